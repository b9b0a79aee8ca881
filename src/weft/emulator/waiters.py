"""The waits for each signal word, and the lines that have signalled it so far."""

from __future__ import annotations

from collections.abc import Iterable

from weft.base.place import Place
from weft.emulator.memory import Allocation
from weft.emulator.protocols import Waiter
from weft.emulator.scheduler import Scheduler

# A tile of atomics on more words than these adds up data: watches hear of none of them.
SIGNALS_IN_A_TILE = 64
# So many lines that signal one word are remembered.
PLACES_KEPT = 4


class Waiters:
    """Those that were set aside until a signal word changes, by word.

    `signallers` are lines that have signalled, by the tensor's name and the word's cell.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.signallers: dict[tuple[str, int], set[Place]] = {}
        # A dict for its order, and because a stream looks at its token more than once.
        self._waiters: dict[tuple[int, int], dict[Waiter, None]] = {}

    def add(self, waiter: Waiter) -> None:
        """Wake `waiter` when the word that it waits for changes."""
        waiting = waiter.waiting
        assert waiting is not None
        waiting.allocation.sync_word(waiting.cell)
        self._waiters.setdefault((id(waiting.allocation), waiting.cell), {})[waiter] = None

    def word_changed(self, allocation: Allocation, cell: int, place: Place | None = None) -> None:
        """A signal word has a new value, signalled at `place`: whoever waits for it looks again."""
        self.scheduler.progress += 1
        if place is not None:
            key = (allocation.name, cell)
            places = self.signallers.get(key)
            if places is None:
                places = self.signallers[key] = set()
            if len(places) < PLACES_KEPT:
                places.add(place)
        waiters = self._waiters.pop((id(allocation), cell), None)
        if waiters:
            _wake(waiters)

    def words_changed(self, allocation: Allocation, cells: list[int], place: Place) -> None:
        """The same for a tile of words; a large one is data, and nobody's signal."""
        self.scheduler.progress += 1
        if len(cells) <= SIGNALS_IN_A_TILE:
            for cell in cells:
                self.word_changed(allocation, cell, place)
        elif self._waiters:
            for cell in cells:
                _wake(self._waiters.pop((id(allocation), cell), ()))

    def wake_spins(self) -> bool:
        """Let all that spin look again: they may wait for something else than the word that they
        looked at last. Says whether there were any."""
        woken = False
        for key, waiters in list(self._waiters.items()):
            spinning = [one for one in waiters if one.waiting.expected is None]
            if spinning:
                woken = True
                _wake(spinning)
                rest = {one: None for one in waiters if one.waiting.expected is not None}
                if rest:
                    self._waiters[key] = rest
                else:
                    del self._waiters[key]
        return woken

    def all(self) -> list[Waiter]:
        return [waiter for waiters in self._waiters.values() for waiter in waiters]

    def clear(self) -> None:
        self._waiters.clear()


def _wake(waiters: Iterable[Waiter]) -> None:
    for waiter in waiters:
        waiter.wake()
