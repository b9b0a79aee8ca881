"""Shadow memory: for every cell its last writer and the accesses since.

The past of a cell is a *history*, and a cell stores only its number, so that a whole tile is
checked by one gather and one comparison: cells that were always touched together have the same
number. Histories change by memoised transitions (read, write, atomic access); a transition looks
for accesses that nothing orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from weft.base.vocabulary import Scope
from weft.emulator.clocks import Agents, Clock, covers

Reach = tuple[Scope | None, int]  # a scope, and the device that it is seen from


class Accesses:
    """Segments that have accessed a cell in one way, the latest first; shared between histories.

    `reach` is that of all of them where it is one, for atomic accesses.
    """

    __slots__ = ("count", "earlier", "reach", "segment")

    def __init__(self, segment: int, earlier: Accesses | None, reach: Reach | None) -> None:
        self.segment = segment
        self.earlier = earlier
        self.count = 1 if earlier is None else earlier.count + 1
        self.reach = reach if earlier is None or earlier.reach == reach else None

    def __iter__(self) -> Iterator[int]:
        node: Accesses | None = self
        while node is not None:
            yield node.segment
            node = node.earlier


class History(NamedTuple):
    """`writer` is a segment; the others are those that came after it."""

    writer: int
    reads: Accesses | None = None
    atomics: Accesses | None = None

    @property
    def is_unwritten(self) -> bool:
        return self.writer == Agents.NOTHING and self.atomics is None


class Accessing(Protocol):
    """One access: its segment, by somebody whose knowledge is `clock` and who `owns` segments."""

    segment: int
    clock: Clock
    owns: Callable[[int], bool]

    def conflict(self, number: int, kind: str, earlier: int) -> None:
        """Nothing orders it after the segment `earlier` in the history of that number."""


# Up to so many different numbers a pass over the cells for each is cheaper than sorting them.
FEW = 8


def carry(cells: np.ndarray, after: Callable[[int], int]) -> bool:
    """Replace every number in `cells` by `after(number)`, called once for each different one.

    Says whether anything changed.
    """
    first = cells.item(0)
    if (cells == first).all():
        number = after(first)
        if number == first:
            return False
        cells[...] = number
        return True
    numbers = np.unique(cells)
    if len(numbers) <= FEW:
        before, changed = cells.copy(), False
        for number in numbers.tolist():
            carried = after(number)
            if carried != number:
                cells[before == number] = carried
                changed = True
        return changed
    carried = np.array([after(number) for number in numbers.tolist()], np.int32)
    if (carried == numbers).all():
        return False
    cells[...] = carried[np.searchsorted(numbers, cells)]
    return True


class Shadow:
    """The histories of one machine and the transitions between them.

    Where an earlier access is not ordered before this one, which is told so, the transition goes on
    as if it were, so that each fault is reported once.
    """

    UNWRITTEN = 0
    INITIAL = 1

    def __init__(self, agents: Agents) -> None:
        self.agents = agents
        self.histories = [History(Agents.NOTHING), History(Agents.BEFORE)]
        self._after_reads: dict[tuple[int, int], int] = {}
        self._after_atomics: dict[tuple[int, int, bool], int] = {}
        self._written: dict[int, int] = {}
        # By the segment of a write: the writer of what it came over, None where several had been.
        self.overwritten: dict[int, int | None] = {}
        self._fresh: dict[tuple[int, int, bool], int] = {}

    def after_read(self, number: int, access: Accessing) -> int:
        """The history after a plain read."""
        segment = access.segment
        key = (number, segment)
        after = self._after_reads.get(key)
        if after is not None:
            return after
        history = self.histories[number]
        self._check_writer(number, history.writer, access)
        atomics = history.atomics
        if atomics is not None:
            unordered = self._unordered(atomics, access)
            for earlier in unordered:
                access.conflict(number, "atomic", earlier)
            if not unordered:
                atomics = None
        reads = self._still_unordered(history.reads, access, is_atomic=False)
        if atomics is None and reads is None:
            after = self._fresh_history(history.writer, segment, is_atomic=False)
        else:
            reads = Accesses(segment, reads, None)
            after = self._number(History(history.writer, reads, atomics))
        self._after_reads[key] = after
        return after

    def after_write(self, number: int, access: Accessing) -> int:
        """The history after a plain write: it begins anew."""
        history, segment = self.histories[number], access.segment
        self._check_writer(number, history.writer, access)
        for kind, accesses in (("read", history.reads), ("atomic", history.atomics)):
            if accesses is not None:
                for earlier in self._unordered(accesses, access):
                    access.conflict(number, kind, earlier)
        writer = history.writer
        if writer != segment and self.overwritten.setdefault(segment, writer) != writer:
            self.overwritten[segment] = None
        return self.written(segment)

    def written(self, segment: int) -> int:
        """The history of a cell that `segment` has just written."""
        after = self._written.get(segment)
        if after is None:
            after = self._written[segment] = self._number(History(segment))
        return after

    def after_atomic(self, number: int, access: Accessing, modifies: bool) -> int:
        """The history after an atomic access.

        Atomic accesses need no order among each other where their scopes include both parties.
        """
        segment = access.segment
        key = (number, segment, modifies)
        after = self._after_atomics.get(key)
        if after is not None:
            return after
        history = self.histories[number]
        self._check_writer(number, history.writer, access)
        reads = history.reads
        if reads is not None and modifies:
            unordered = self._unordered(reads, access)
            for earlier in unordered:
                access.conflict(number, "read", earlier)
            if not unordered:
                reads = None
        reach = self._reach(segment)
        if history.atomics is not None and not self._all_covered(history.atomics, reach):
            for earlier in self._unordered(history.atomics, access):
                if not self.agents.covers(earlier, segment):
                    access.conflict(number, "scope", earlier)
        writer = max(history.writer, Agents.BEFORE) if modifies else history.writer
        atomics = self._still_unordered(history.atomics, access, is_atomic=True)
        if reads is None and atomics is None:
            after = self._fresh_history(writer, segment, is_atomic=True)
        else:
            after = self._number(History(writer, reads, Accesses(segment, atomics, reach)))
        self._after_atomics[key] = after
        return after

    # ------------------------------------------------------------------------------------------

    def _number(self, history: History) -> int:
        self.histories.append(history)
        return len(self.histories) - 1

    def _fresh_history(self, writer: int, segment: int, *, is_atomic: bool) -> int:
        """The history of one access since `writer`: one number, whatever was there before."""
        key = (writer, segment, is_atomic)
        number = self._fresh.get(key)
        if number is None:
            accesses = Accesses(segment, None, self._reach(segment) if is_atomic else None)
            history = History(writer, *((None, accesses) if is_atomic else (accesses, None)))
            number = self._fresh[key] = self._number(history)
        return number

    def _reach(self, segment: int) -> Reach:
        return self.agents.segment_scope[segment], self.agents.segment_device[segment]

    @staticmethod
    def _all_covered(atomics: Accesses, reach: Reach) -> bool:
        """Do these scopes and that of `reach` include each other, seen at a glance?"""
        if atomics.reach is None:
            return False
        scope, device = atomics.reach
        return covers(scope, reach[0], device == reach[1])

    def _check_writer(self, number: int, writer: int, access: Accessing) -> None:
        if not (access.owns(writer) or self.agents.known(writer, access.clock)):
            access.conflict(number, "write", writer)

    def _unordered(self, accesses: Accesses, access: Accessing) -> list[int]:
        own, known, clock = access.owns, self.agents.known, access.clock
        return [s for s in accesses if not (own(s) or known(s, clock))]

    def _still_unordered(
        self, accesses: Accesses | None, access: Accessing, *, is_atomic: bool
    ) -> Accesses | None:
        """`accesses` without those that are ordered before: what is ordered after this one is after
        them too. Looked for at powers of two only: a long list costs no more than it has entries.
        """
        if accesses is None or accesses.count & (accesses.count - 1):
            return accesses
        unordered = self._unordered(accesses, access)
        if len(unordered) == accesses.count:
            return accesses
        kept = None
        for earlier in reversed(unordered):
            reach = self._reach(earlier) if is_atomic else None
            kept = Accesses(earlier, kept, reach)
        return kept
