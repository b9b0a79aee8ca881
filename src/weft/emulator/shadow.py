"""Shadow memory: for every cell who wrote it last and who has read it since.

The past of a cell is an interned *history*, and a cell stores only its number, so that a whole
tile is checked by one gather and one comparison: cells that were always touched together have the
same number. Histories change by memoised transitions (read, write, atomic access); a transition
looks for accesses that nothing orders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.emulator.clocks import Agents, Clock


@dataclass(frozen=True)
class History:
    """`writer` is a segment; `others` are the segments that have read, or accessed atomically."""

    writer: int
    others: tuple[int, ...] = ()


class Shadow:
    """The histories of one machine and the transitions between them.

    `on_conflict(kind, earlier segment)` is called for an access that an earlier one is not
    ordered with; the transition then goes on as if it were, so that one fault is told once.
    """

    UNWRITTEN = 0
    INITIAL = 1

    def __init__(self, agents: Agents) -> None:
        self.agents = agents
        self.histories = [History(Agents.NOTHING), History(Agents.BEFORE)]
        self._numbers = {history: number for number, history in enumerate(self.histories)}
        self._reads: dict[tuple[int, int], int] = {}
        self._writes: dict[int, int] = {}

    def _number(self, history: History) -> int:
        number = self._numbers.get(history)
        if number is None:
            number = self._numbers[history] = len(self.histories)
            self.histories.append(history)
        return number

    def after_read(
        self, number: int, segment: int, clock: Clock, own: Callable[[int], bool],
        on_conflict: Callable[[str, int], None],
    ) -> int:  # fmt: skip
        """The history after a plain read by `segment`; `own(s)` says that s is the reader's."""
        key = (number, segment)
        after = self._reads.get(key)
        if after is not None:
            return after
        history = self.histories[number]
        known, agents = self.agents.known, self.agents
        if not (own(history.writer) or known(history.writer, clock)):
            on_conflict("write", history.writer)
        kept = []
        for other in history.others:
            if own(other) or known(other, clock):
                # A later writer that is ordered after this read is ordered after that one too.
                continue
            kept.append(other)
            if agents.segment_scope[other] is not None:
                on_conflict("atomic", other)
        after = self._number(History(history.writer, (*kept, segment)))
        self._reads[key] = after
        return after

    def after_write(
        self, number: int, segment: int, clock: Clock, own: Callable[[int], bool],
        on_conflict: Callable[[str, int], None],
    ) -> int:  # fmt: skip
        """The history after a plain write by `segment`."""
        history = self.histories[number]
        known = self.agents.known
        if not (own(history.writer) or known(history.writer, clock)):
            on_conflict("write", history.writer)
        for other in history.others:
            if not (own(other) or known(other, clock)):
                kind = "read" if self.agents.segment_scope[other] is None else "atomic"
                on_conflict(kind, other)
        return self.written(segment)

    def written(self, segment: int) -> int:
        """The history of a cell that `segment` has just written."""
        after = self._writes.get(segment)
        if after is None:
            after = self._writes[segment] = self._number(History(segment))
        return after

    def after_atomic(
        self, number: int, segment: int, clock: Clock, own: Callable[[int], bool],
        on_conflict: Callable[[str, int], None], modifies: bool,
    ) -> int:  # fmt: skip
        """The history after an atomic access by `segment`.

        Atomic accesses need no order among each other where their scopes include both parties.
        """
        history = self.histories[number]
        agents = self.agents
        if not (own(history.writer) or agents.known(history.writer, clock)):
            on_conflict("write", history.writer)
        kept = []
        for other in history.others:
            if own(other) or agents.known(other, clock):
                continue
            kept.append(other)
            if agents.segment_scope[other] is None:
                if modifies:
                    on_conflict("read", other)
            elif not agents.covers(other, segment):
                on_conflict("scope", other)
        writer = max(history.writer, Agents.BEFORE) if modifies else history.writer
        return self._number(History(writer, (*kept, segment)))
