"""Statements of one kind, found once: plans and kernels are asked again at calls of new sizes."""

from __future__ import annotations

from functools import cached_property
from typing import Any


class ByKind:
    """Of a frozen dataclass that has `statements`."""

    statements: tuple[Any, ...]

    def of(self, kind: type | tuple[type, ...]) -> list:
        """The statements of one kind, in order."""
        found = self._by_kind.get(kind)
        if found is None:
            found = self._by_kind[kind] = [one for one in self.statements if isinstance(one, kind)]
        return [*found]

    @cached_property
    def _by_kind(self) -> dict[type | tuple[type, ...], list]:
        return {}
