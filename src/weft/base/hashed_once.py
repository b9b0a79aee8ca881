"""Hashes of large records, found once: programs and kernels are keys of what is kept of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class HashedOnce:
    """Of a frozen dataclass whose body says `__hash__ = HashedOnce.__hash__`.

    The hash stays with the object in this process: another process hashes strings otherwise.
    """

    def __hash__(self) -> int:
        found = vars(self).get("_hash")
        if found is None:
            found = hash(tuple(self._compared().values()))
            vars(self)["_hash"] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self._compared()

    def _compared(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
