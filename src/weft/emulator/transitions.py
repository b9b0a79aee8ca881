"""Accesses of programs: one history number in, the next one out, conflicts reported."""

from __future__ import annotations

import numpy as np


class Access:
    """One access of one program; called once per distinct history that it meets."""

    __slots__ = ("allocation", "cells", "loc", "program", "segment", "shadow")
    what = ""

    def __init__(self, program, allocation, loc, cells, segment=None, shadow=None) -> None:
        self.program = program
        self.allocation = allocation
        self.loc = loc
        self.cells = cells
        self.segment = program.segment(loc) if segment is None else segment
        self.shadow = shadow

    def conflict(self, number: int):
        """The callback for a transition out of history `number`."""

        def report(kind: str, earlier: int) -> None:
            self.program.findings.race(
                self.program, self.allocation, self._where(number), self.what, kind, earlier,
                self.program.locations[self.loc], self.segment,
                self.program.shadow.histories[number].writer,
            )  # fmt: skip

        return report

    def _where(self, number: int) -> int:
        """The first cell of this access whose history is `number`."""
        cells = np.ravel(self.cells)
        if self.shadow is not None:
            hit = np.argwhere(self.shadow == number)
            if len(hit):
                offset = sum(int(i) * (s // 4) for i, s in zip(hit[0], self.shadow.strides))
                return int(cells[0]) + offset
            return int(cells[0])
        hit = np.flatnonzero(self.allocation.shadow.take(cells) == number)
        return int(cells[hit[0]]) if len(hit) else int(cells[0])


class Read(Access):
    __slots__ = ()
    what = "read"

    def __call__(self, number: int) -> int:
        program = self.program
        shadow = program.shadow
        after = shadow.known_after_read(number, self.segment)
        if after is not None:
            return after
        if shadow.histories[number].is_unwritten:
            program.findings.uninitialised(
                program, self.allocation, self._where(number), program.locations[self.loc]
            )
        return shadow.after_read(
            number, self.segment, program.clock, program.owns, self.conflict(number)
        )


class Write(Access):
    __slots__ = ()
    what = "write"

    def __call__(self, number: int) -> int:
        program = self.program
        return program.shadow.after_write(
            number, self.segment, program.clock, program.owns, self.conflict(number)
        )


class Atomic(Access):
    __slots__ = ("modifies",)
    what = "atomic access"

    def __init__(self, program, allocation, loc, cells, segment, modifies: bool) -> None:
        super().__init__(program, allocation, loc, cells, segment)
        self.modifies = modifies

    def __call__(self, number: int) -> int:
        program = self.program
        history = program.shadow.histories[number]
        if history.is_unwritten and not self.modifies:
            self._unwritten(number)
        if history.reads is not None and program.ledger is not None:
            program.ledger.was_read(self.allocation)
        if program.adds_floats and history.atomics is not None:
            program.findings.arrival(
                program, self.allocation, self._where(number), history.atomics, self.loc
            )
        return program.shadow.after_atomic(
            number, self.segment, program.clock, program.owns, self.conflict(number),
            self.modifies,
        )  # fmt: skip

    def _unwritten(self, number: int) -> None:
        program = self.program
        program.findings.uninitialised(
            program, self.allocation, self._where(number), program.locations[self.loc]
        )


class Awaited(Atomic):
    """The look that ends a wait."""

    __slots__ = ()
    what = "wait"

    def __init__(self, program, allocation, loc, cells, segment) -> None:
        super().__init__(program, allocation, loc, cells, segment, False)

    def _unwritten(self, number: int) -> None:
        program = self.program
        program.findings.stale_signal(
            program, self.allocation, self._where(number), program.locations[self.loc]
        )
