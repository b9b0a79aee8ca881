"""Accesses to memory as they are checked: those of programs, copy engines, torch and hosts alike.

An `Access` takes each history number that its cells hold to the next one, and reports what nothing
orders. An `Accessor` makes them; its one way to an atomic access is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from weft.base.errors import UsageError
from weft.base.place import Place
from weft.base.vocabulary import Scope
from weft.emulator.choices import Chooser, Sight
from weft.emulator.clocks import Agents, Clock
from weft.emulator.findings import Findings, index_of
from weft.emulator.ledger import Ledger
from weft.emulator.memory import Allocation, Memory, SyncWord
from weft.emulator.observation import Observation, Observer, Watch
from weft.emulator.scheduler import Waiters
from weft.emulator.shadow import Shadow
from weft.emulator.traffic import Traffic
from weft.language.triton_api import TRITON_VERSION


class Checker:
    """Memory and its shadow, the agents' clocks, what was found.

    `watches` are called for all that synchronises; `sight` says which value of a word an atomic
    load sees.
    """

    def __init__(
        self, name: str, num_ranks: int, chooser: Chooser, observers: Sequence[Observer]
    ) -> None:
        self.memory = Memory()
        self.agents = Agents()
        self.shadow = Shadow(self.agents)
        self.traffic = Traffic()
        self.watches: list[Watch] = []
        self.findings = Findings(name, num_ranks, self.agents, self.watches)
        self.sight = chooser if isinstance(chooser, Sight) else None
        if isinstance(chooser, Watch):
            self.watches.append(chooser)
        if observers:
            self.watches.append(Observation(self.agents, list(observers)))
        # Behind the observers: they hear of a signal before its fault.
        self.ledger = Ledger(self.agents, self.shadow, self.findings)
        self.watches.append(self.ledger)
        self.findings.weak_link = self.ledger.weak_link
        self.findings.overwritten = self.shadow.overwritten.get


# From this version on a release by tl.atomic_* completes the program's asynchronous stores.
RELEASE_COMPLETES_STORES = TRITON_VERSION >= (3, 8)


class Killed(Exception):
    """Ends one program; what was wrong has been reported."""


class Access:
    """One access at `loc`; called once per distinct history that it meets.

    `shadow` is the view that it goes through where `cells` has only its first cell.
    """

    __slots__ = ("allocation", "by", "cells", "clock", "loc", "owns", "segment", "shadow")
    what, fault = "", "uninitialised"

    def __init__(
        self, by: Accessor, allocation: Allocation, loc: Any, cells: np.ndarray,
        segment: int | None = None, shadow: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.by = by
        self.allocation = allocation
        self.loc = loc
        self.cells = cells
        self.segment = by.segment(loc) if segment is None else segment
        self.clock, self.owns = by.clock, by.owns
        self.shadow = shadow

    def conflict(self, number: int, kind: str, earlier: int) -> None:
        by = self.by
        by.findings.race(
            by, self.allocation, self.where(number), self.what, kind, earlier, self.loc,
            self.segment, by.shadow.histories[number].writer,
        )  # fmt: skip

    def where(self, number: int) -> int:
        """The first cell of this access whose history is `number`."""
        cells = np.ravel(self.cells)
        if self.shadow is not None:
            hit = np.argwhere(self.shadow == number)[:1]
            return int(cells[0]) + sum(int(i) * (s // 4) for i, s in zip(*hit, self.shadow.strides))
        hit = np.flatnonzero(self.allocation.shadow.take(cells) == number)
        return int(cells[hit[0]]) if len(hit) else int(cells[0])

    def unwritten(self, number: int) -> bool:
        """It looks at cells that nothing has written; says whether it leaves no trace there."""
        index = index_of(self.allocation, self.where(number))
        self.by.findings.fault(self.fault, self.by, self.loc, self.allocation, index)
        return False


class Read(Access):
    __slots__ = ()
    what = "read"

    def __call__(self, number: int) -> int:
        shadow = self.by.shadow
        if shadow.histories[number].is_unwritten and self.unwritten(number):
            return number
        return shadow.after_read(number, self)


class Moved(Read):
    """A read that only moves values: it may meet unwritten ones. Where no peer can write them, a
    later read that looks is reported."""

    __slots__ = ()

    def unwritten(self, number: int) -> bool:
        return self.allocation.heap_offset is None


class Write(Access):
    __slots__ = ()
    what = "write"

    def __call__(self, number: int) -> int:
        return self.by.shadow.after_write(number, self)


class Atomic(Access):
    __slots__ = ("modifies",)
    what = "atomic access"

    def __init__(self, *where: Any, modifies: bool) -> None:
        super().__init__(*where)
        self.modifies = modifies

    def __call__(self, number: int) -> int:
        by = self.by
        history = by.shadow.histories[number]
        if history.is_unwritten and not self.modifies:
            self.unwritten(number)
        if history.reads is not None:
            by.ledger.was_read(self.allocation)
        if by.adds_floats and history.atomics is not None:
            where = self.where(number)
            by.findings.arrival(by, self.allocation, where, history.atomics, self.loc)
        return by.shadow.after_atomic(number, self, self.modifies)


class Awaited(Atomic):
    """The look that ends a wait."""

    __slots__ = ()
    what, fault = "wait", "stale signal"


class Accessor:
    """Whoever accesses memory under an agent's clock: a program, or an actor.

    A `loc` is what it knows its places by; `work` is None for a host.
    """

    adds_floats = False  # while it does: sums then depend on the order
    sees_newest = False  # at its next look: nobody sees an old value for ever

    def __init__(
        self, checker: Checker, waiters: Waiters, agent: int, clk: int, clock: Clock, work: Any
    ) -> None:
        self.memory = checker.memory
        self.shadow = checker.shadow
        self.agents = checker.agents
        self.findings = checker.findings
        self.ledger = checker.ledger
        self.traffic = checker.traffic
        self.watches = checker.watches
        self.sight = checker.sight
        self.waiters = waiters
        self.agent = agent
        self.clk = clk
        self.clock = clock
        self.work = work
        self.rank = self.agents.identity[agent].rank
        self.device_number = self.agents.device[agent]

    def owns(self, segment: int) -> bool:
        return self.agents.segment_agent[segment] == self.agent

    def place_of(self, loc: Any) -> Place:
        raise NotImplementedError

    def segment(self, loc: Any, scope: Scope | None = None) -> int:
        """The number of what is done now at `loc`; `scope` is given for atomic accesses."""
        return self.agents.segment(self.agent, self.clk, self.place_of(loc), scope)

    def knows(self, agent: int, clock: int) -> bool:
        """Is that past of `agent` ordered before what this one does now?"""
        if agent == self.agent or self.clock.agents.get(agent, -1) >= clock:
            return True
        agents = self.agents
        return self.clock.streams.get(agents.stream[agent], -1) >= agents.position[agent]

    def learn(self, clocks: Iterable[Clock]) -> None:
        for clock in clocks:
            self.clock.join(clock)

    def publish(self) -> Clock:
        """What a release hands over: all that is known here, and the own past, which ends there."""
        clock = self.clock.copy()
        clock.learn(self.agent, self.clk)
        self.clk += 1
        return clock

    def complete_stores(self) -> None:
        """All asynchronous stores so far are done, as seen by releases."""

    def saw(self, word: SyncWord, scope: Scope) -> None:
        """A relaxed look at a word: a fence behind it may yet make it an acquire."""

    def pause(self, coming: str = "") -> None:
        """A point at which somebody else may go first."""

    def poll(self, allocation, index, dtype, loc, value) -> None:
        """An access has changed nothing."""

    def fail(self, error: type, kind: str, message: str, loc: Any, *, remedy: str) -> None:
        """Report something after which this one cannot go on, and end it."""
        self.findings.failure(self, error, kind, message, self.place_of(loc), remedy)
        raise Killed

    # ------------------------------------------------------------------------------------------

    def find(self, lo: int, hi: int, loc: Any) -> Allocation | None:
        """The one allocation that holds lo .. hi - 1, if there is one."""
        found = self.memory.find(lo)
        return None if found is None or hi > found.end else found

    def locate(self, ptr: Any, itemsize: int, what: str, loc: Any):
        """(allocation, element index) of one address; None when it is out of bounds."""
        address = int(ptr)
        allocation = self.find(address, address + itemsize, loc)
        if allocation is None:
            self.findings.out_of_bounds(self, address, itemsize, what, loc)
            return None
        if itemsize < allocation.cell_bytes:
            allocation.refine(itemsize)
        offset = address - allocation.address
        if offset % itemsize:
            self.misaligned(allocation, itemsize, loc)
        return allocation, offset // itemsize

    def misaligned(self, allocation: Allocation, itemsize: int, loc: Any) -> None:
        self.fail(
            UsageError, "misaligned",
            f"an access of {itemsize}-byte elements to {allocation.name} at an address that"
            f" {itemsize} does not divide", loc,
            remedy="GPUs fault here: check pointer casts and byte offsets",
        )  # fmt: skip

    def moves(self, kind: Any, allocation: Allocation, num_bytes: int) -> None:
        """Count what an access of another rank's memory moves."""
        if issubclass(kind, Write):
            self.traffic.carried(self.rank, allocation.rank, num_bytes)
        elif issubclass(kind, Read):
            self.traffic.carried(allocation.rank, self.rank, num_bytes)

    def touch_element(self, kind: Any, allocation, index, itemsize, loc, segment=None, **how):
        """Take one element's cells through an access of this kind."""
        if allocation.rank != self.rank:
            self.moves(kind, allocation, itemsize)
        factor = itemsize // allocation.cell_bytes
        first = index * factor
        access = kind(self, allocation, loc, np.array([first]), segment, **how)
        for cell in range(first, first + factor):
            number = allocation.shadow.item(cell)
            after = access(number)
            if after != number:
                allocation.shadow[cell] = after

    def atomic(
        self, allocation, index, dtype, loc, order, scope, change, *, how="update", kind=Atomic
    ):
        """One atomic access: `change(old)` is the new value, None if it writes none: an exchange
        that failed, which releases nothing. Returns the old one.

        `how`: "set" is a store, with which ends what earlier releases published, "take" one by a
        stream; of an "add" nobody gets the old value; "load" and "test" change nothing; all else
        is an "update".
        """
        replaces = how in ("set", "take")
        self.pause(how)
        view = allocation.view(dtype)
        old = view[index]
        cell = index * (dtype.itemsize // allocation.cell_bytes)
        word = allocation.sync_word(cell)
        if self.sight is not None and how in ("load", "test"):
            newest, is_due = old, self.sees_newest
            old, word = self.sight.seen(
                self, allocation, cell, old, word, lambda value: not is_due or value == newest
            )
            self.sees_newest = False
        new = change(old)
        writes = new is not None
        modifies = bool(writes and (new != old or replaces))
        segment = self.segment(loc, scope)
        self.touch_element(kind, allocation, index, dtype.itemsize, loc, segment, modifies=modifies)
        if order.acquires:
            self.learn(word.acquire(self.device_number, scope))
        else:
            self.saw(word, scope)
        if self.sight is None:  # which keeps what words have held itself
            if modifies:
                word.values.stored(self, old, new, word.published)
            else:
                word.values.looked(self, old)
        if replaces:
            word.published.clear()
        releases = writes and order.releases
        if releases:
            if RELEASE_COMPLETES_STORES:
                self.complete_stores()
            word.release(self.device_number, scope, self.publish())
        place, release = self.place_of(loc), scope if releases else None
        if modifies:
            view[index] = new
            if how == "update" and new < old:  # not a ticket, which counts up
                self.ledger.met(self, allocation, cell, place, scope if order.acquires else None)
            for watch in self.watches:
                if how == "take":
                    watch.taken(self, allocation, cell, place)
                else:
                    values = old.item(), new.item()
                    watch.signalled(self, allocation, cell, *values, place, how, release)
            self.waiters.word_changed(allocation, cell, None if how == "take" else place)
        else:
            acquire = scope if order.acquires else None
            for watch in self.watches:
                watch.looked(self, how, allocation, cell, old.item(), place, acquire, release)
            self.poll(allocation, index, dtype, loc, old)
        return old
