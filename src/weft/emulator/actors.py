"""Accesses by copy engines and by torch operations on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from weft.base.place import Place
from weft.base.vocabulary import Scope
from weft.emulator.checker import Checker
from weft.emulator.clocks import NOWHERE, Clock
from weft.emulator.device import Device, Work
from weft.emulator.memory import Allocation, Span
from weft.emulator.shadow import carry
from weft.emulator.waiters import Waiters
from weft.emulator.words import WORD


class Actor:
    """Does strided accesses under one agent's clock, at one place of the host's code."""

    def __init__(
        self, checker: Checker, waiters: Waiters, agent: int, clk: int, clock: Clock, place: Place,
        work: Work | None = None,
    ) -> None:  # fmt: skip
        self.checker = checker
        self.waiters = waiters
        self.agents = checker.agents
        self.memory = checker.memory
        self.agent = agent
        self.clk = clk
        self.clock = clock
        self.place = place
        self.work = work

    @classmethod
    def of_work(cls, work: Work, what: str) -> Actor:
        """Somebody to do `work`'s accesses, ordered behind its stream's earlier work."""
        stream, device = work.stream, work.stream.device
        agent = device.checker.agents.add(
            stream.identity(what), stream.number, work.position, device=NOWHERE
        )
        return cls(device.checker, device.waiters, agent, 0, work.clock, work.place, work)

    @classmethod
    def of_host(cls, device: Device, rank: int, place: Place) -> Actor:
        """The host of `rank`, which looks at memory itself."""
        host = device.hosts.by_rank[rank]
        return cls(device.checker, device.waiters, host.agent, host.clk, host.clock, place)

    @property
    def rank(self) -> int:
        return self.agents.identity[self.agent].rank

    def owns(self, segment: int) -> bool:
        return self.agents.segment_agent[segment] == self.agent

    def access(self, spans: Iterable[Span], is_write: bool, *, looks: bool = True) -> None:
        """Check and note each span; spans in untracked memory are passed over.

        A read that only moves values (`looks` is False) may meet unwritten ones.
        """
        for span in spans:
            for allocation, shadow, start in self._shadows(span):
                self._touch(allocation, shadow, start, is_write, looks)

    def copy(self, dst: Span, src: Span) -> None:
        """Move the bytes of `src` to `dst`, as a transfer that other agents may race with."""
        for span, what in ((src, "reads"), (dst, "writes")):
            self._check_bounds(span, what)
        if self.checker.is_on:
            self.access([src], is_write=False)
            self.access([dst], is_write=True)
        self._view(dst)[...] = self._view(src)

    def read_word(self, address: int) -> int:
        allocation, index = self._word(address, "reads")
        self._atomic(allocation, index, modifies=False)
        seen = int(allocation.view(WORD)[index])
        cell = index * (WORD.itemsize // allocation.cell_bytes)
        if self.checker.sight is not None:
            word = allocation.sync_word(cell)
            seen = int(self.checker.sight.seen(self, allocation, cell, seen, word)[0])
        for watch in self.checker.watches:
            watch.looked(self, "load", allocation, cell, seen, self.place, None)
        return seen

    def write_word(self, address: int, value: int) -> int:
        """Store a signal word behind everything that this actor's stream has done; the old one."""
        allocation, index = self._word(address, "signals")
        self._atomic(allocation, index, modifies=True)
        before = int(allocation.view(WORD)[index])
        cell = self._store(allocation, index, value)
        for watch in self.checker.watches:
            watch.signalled(self, allocation, cell, before, value, self.place, "set", Scope.SYSTEM)
        self.waiters.word_changed(allocation, cell, self.place)
        return before

    def take_word(self, address: int) -> None:
        """Set a word that is 1 back to 0, knowing from here on what was released with the 1."""
        allocation, index = self._word(address, "takes")
        cell = index * (WORD.itemsize // allocation.cell_bytes)
        if self.checker.is_on:
            if self.checker.shadow.histories[int(allocation.shadow[cell])].is_unwritten:
                self.checker.findings.stale_signal(self, allocation, cell, self.place)
        self._atomic(allocation, index, modifies=True)
        for clock in allocation.sync_word(cell).acquire(NOWHERE, Scope.SYSTEM):
            self.clock.join(clock)
        self._store(allocation, index, 0)
        for watch in self.checker.watches:
            watch.taken(self, allocation, cell, self.place)
        self.waiters.word_changed(allocation, cell)

    def _store(self, allocation: Allocation, index: int, value: int) -> int:
        """Store a word and release; its cell."""
        cell = index * (WORD.itemsize // allocation.cell_bytes)
        word = allocation.sync_word(cell)
        word.published.clear()
        clock = self.clock.copy()
        clock.learn(self.agent, self.clk)
        # A stream is no part of any device: only system scope includes it.
        word.release(NOWHERE, Scope.SYSTEM, clock)
        allocation.view(WORD)[index] = value
        return cell

    def _word(self, address: int, what: str) -> tuple[Allocation, int]:
        self._check_bounds((address, (1,), (8,), WORD), what)
        allocation = self.memory.find(address)
        if allocation.cell_bytes > WORD.itemsize:
            allocation.refine(WORD.itemsize)
        return allocation, (address - allocation.address) // WORD.itemsize

    def _atomic(self, allocation: Allocation, index: int, *, modifies: bool) -> None:
        checker = self.checker
        if not checker.is_on:
            return
        segment = checker.agents.segment(self.agent, self.clk, self.place, Scope.SYSTEM)
        factor = WORD.itemsize // allocation.cell_bytes
        for cell in range(index * factor, (index + 1) * factor):
            number = int(allocation.shadow[cell])
            if checker.shadow.histories[number].reads is not None and checker.ledger is not None:
                checker.ledger.was_read(allocation)
            allocation.shadow[cell] = checker.shadow.after_atomic(
                number, segment, self.clock, self.owns,
                self._conflict(allocation, cell, "atomic access"), modifies,
            )  # fmt: skip

    def _check_bounds(self, span: Span, what: str) -> None:
        address, shape, strides, dtype = span
        if 0 in shape:
            return
        end = address + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        allocation = self.memory.find(address)
        if allocation is None or end + dtype.itemsize > allocation.end:
            bad = address if allocation is None else allocation.end
            near = self.memory.nearest(bad)
            self.checker.findings.out_of_bounds(self, near, bad, dtype.itemsize, what, self.place)

    def _view(self, span: Span) -> np.ndarray:
        address, shape, strides, dtype = span
        if 0 in shape:
            return np.empty(shape, dtype)
        nbytes = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
        buffer = (ctypes.c_char * nbytes).from_address(address)
        return np.ndarray(shape, dtype, buffer, 0, strides)

    def _shadows(self, span: Span):
        """(allocation, view of its shadow, first cell) for a span of tracked memory."""
        address, shape, strides, dtype = span
        if 0 in shape:
            return
        allocation = self.memory.find(address)
        if allocation is None:
            return
        itemsize = dtype.itemsize
        if itemsize < allocation.cell_bytes:
            allocation.refine(itemsize)
        cell_bytes = allocation.cell_bytes
        end = address + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + itemsize
        if end > allocation.end or any(s % cell_bytes or s < 0 for s in strides):
            return
        start = (address - allocation.address) // cell_bytes
        factor = itemsize // cell_bytes
        yield (
            allocation,
            np.ndarray(
                (*shape, factor), np.int32, allocation.shadow, start * 4,
                (*(s // cell_bytes * 4 for s in strides), 4),
            ),
            start,
        )  # fmt: skip

    def _touch(
        self, allocation: Allocation, shadow: np.ndarray, start: int, is_write: bool, looks: bool
    ) -> None:
        checker = self.checker
        segment = checker.agents.segment(self.agent, self.clk, self.place)
        if allocation.sync and checker.ledger is not None:
            end = start + 1 + sum((n - 1) * (s // 4) for n, s in zip(shadow.shape, shadow.strides))
            checker.ledger.touched(self, allocation, start, end, is_write)

        def cell_of(number: int) -> int:
            hit = np.argwhere(shadow == number)[0]
            steps = zip(hit, shadow.strides, strict=True)
            return start + sum(int(i) * (s // 4) for i, s in steps)

        def after(number: int) -> int:
            what = "write" if is_write else "read"
            found = checker.shadow.histories[number].writer
            conflict = self._conflict(allocation, lambda: cell_of(number), what, found)
            if is_write:
                return checker.shadow.after_write(number, segment, self.clock, self.owns, conflict)
            if checker.shadow.histories[number].is_unwritten:
                if looks:
                    checker.findings.uninitialised(self, allocation, cell_of(number), self.place)
                elif allocation.heap_offset is None:
                    return number  # a later read that looks is reported; no peer can write it
            return checker.shadow.after_read(number, segment, self.clock, self.owns, conflict)

        carry(shadow, after)

    def _conflict(
        self, allocation: Allocation, cell: Any, what: str, found: int | None = None
    ) -> Callable[[str, int], None]:
        def report(kind: str, earlier: int) -> None:
            at = cell() if callable(cell) else cell
            self.checker.findings.race(
                self, allocation, at, what, kind, earlier, self.place, found=found
            )

        return report
