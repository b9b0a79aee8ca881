"""What recordings of the user's were made with: kept until nothing can replay them any more."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from weft.runtime.backend import Backend, Life


class Recorded:
    """Things by key, each kept for the recordings under way when `keep` was called."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._of: dict[Life, dict[Hashable, Any]] = {}

    def keep(self, key: Hashable, thing: Any) -> None:
        """Keep `thing` as long as the recording that is under way may be replayed."""
        life = self._backend.recorded_life()
        if life not in self._of:
            self._forget_those_gone()
            self._of[life] = {}
        self._of[life][key] = thing

    def get(self, key: Hashable) -> Any:
        """None where no recording keeps a thing of this key."""
        return next((kept[key] for kept in self._of.values() if key in kept), None)

    def items(self) -> Iterator[tuple[Hashable, Any]]:
        """A key comes once for each recording."""
        self._forget_those_gone()
        for kept in self._of.values():
            yield from kept.items()

    def clear(self) -> None:
        self._of.clear()

    def _forget_those_gone(self) -> None:
        self._of = {life: kept for life, kept in self._of.items() if not life.is_over}
