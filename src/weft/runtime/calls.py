"""What operators found out about calls of a kind: kept for the kinds that were used last.

Sizes that change call by call (a prompt of one more token) make kinds without end. What is kept of
one is a choice of how to do it, its launches, and some memory of this rank's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from weft.runtime.backend import Backend
from weft.runtime.recorded import Recorded

# Which part of all kinds goes at once: before that the host waits for the device. A model has a few
# dozen for each number of tokens.
PART_AT_ONCE = 8


class Calls:
    """By what tells kinds apart, what `make` of an operator has returned.

    Ranks that make the same calls forget the same ones. What a recording of the user's was made
    with stays as long as that recording: its replays use that memory. `forget` is given what was
    forgotten, of which nothing is in flight any more.
    """

    def __init__(
        self, backend: Backend, forget: Callable[[Sequence[Any]], None], most: int
    ) -> None:
        self._backend, self._forget, self.most = backend, forget, most
        self._latest: OrderedDict[Hashable, Any] = OrderedDict()
        self._recorded = Recorded(backend)
        self._once: dict[Hashable, Any] = {}
        self._covered: dict[Hashable, tuple[Mapping[str, int], Any]] = {}
        self._is_recording = backend.is_recording
        # How often something was asked for while a recording was under way.
        self.num_recorded = 0

    def __len__(self) -> int:
        return len(self._latest.keys() | dict(self._recorded.items()).keys())

    def get(self, key: Hashable) -> Any:
        """What is known of calls of this kind; None where nothing is."""
        found = self._latest.get(key)
        if found is None:
            found = self._recorded.get(key)
        elif 2 * len(self._latest) > self.most:
            # While few are kept their order decides nothing, and a key is hashed at each look.
            self._latest.move_to_end(key)
        if found is not None and self._is_recording():
            self._keep(key, found)
        return found

    def __setitem__(self, key: Hashable, found: Any) -> None:
        self._latest[key] = found
        if self._is_recording():
            self._keep(key, found)
        elif len(self._latest) > self.most:
            self._forget_oldest(-(-self.most // PART_AT_ONCE))

    def _keep(self, key: Hashable, found: Any) -> None:
        self.num_recorded += 1
        self._recorded.keep(key, found)

    def is_first(self, key: Hashable, kept: Any) -> bool:
        """Is this asked for the first time? For steps that all ranks take together, which what
        they have forgotten must not decide: `key` is the same on all, and never forgotten, nor is
        what it is a number of (`kept`)."""
        count = len(self._once)
        self._once.setdefault(key, kept)
        return len(self._once) > count

    def is_covered(self, key: Hashable, sizes: Mapping[str, int]) -> bool:
        """Was `cover` called with sizes that are nowhere smaller?"""
        largest, _ = self._covered.get(key, ({}, None))
        return bool(largest) and all(sizes[name] <= largest[name] for name in sizes)

    def cover(self, key: Hashable, sizes: Mapping[str, int], kept: Any = None) -> None:
        """What calls of these sizes need is there, as long as the world is, and so for smaller
        ones. Never forgotten, nor is what the key is a number of (`kept`)."""
        largest, _ = self._covered.get(key, ({}, None))
        if all(sizes[name] >= largest.get(name, 0) for name in sizes):
            self._covered[key] = dict(sizes), kept

    def forget_all(self) -> bool:
        """All but what recordings of the user's were made with; was there anything?"""
        count = len(self._latest)
        if count:
            self._forget_oldest(count)
        return count > 0

    def _forget_oldest(self, count: int) -> None:
        self._backend.drain()
        old = [self._latest.popitem(last=False) for _ in range(count)]
        recorded = dict(self._recorded.items())
        self._forget([one for key, one in old if key not in recorded])

    def clear(self) -> None:
        self._once.clear()
        self._covered.clear()
        self._latest.clear()
        self._recorded.clear()
