"""What a program does within its block: shared memory, mbarriers, asynchronous copies, products.

An asynchronous operation is checked when it is issued, as an access of an agent of its own, of
which its issuer knows nothing until it has waited. What it writes is there later: a load's when the
scheduler says so, a product's and a thread's copy's when they are waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from weft.base.counts import counted
from weft.base.errors import OutOfBoundsError, SignalError, UninitializedError, UnsupportedError
from weft.base.report import Finding
from weft.base.vocabulary import Scope
from weft.emulator import numerics
from weft.emulator.accesses import Access, Atomic, Moved, Read, Write
from weft.emulator.affine import Window
from weft.emulator.assembly import Threads
from weft.emulator.clocks import Clock
from weft.emulator.findings import element_name, index_of, tensor_name
from weft.emulator.scheduler import Waiting
from weft.emulator.shared_memory import Barrier, Beyond, Past, SharedMemory, View


class _ByAsynchronousProxy(Access):
    """An access of shared memory by TMA or tensor cores: what threads wrote needs a fence."""

    __slots__ = ()

    def __call__(self, number: int) -> int:
        by, memory = self.by, self.allocation
        writer = by.shadow.histories[number].writer
        if memory.unfenced(writer, by.agents, by.fenced):
            if by.owns(writer) or by.agents.known(writer, self.clock):
                by.unfenced(memory, self.where(number), self.what, writer, self.loc)
        return super().__call__(number)  # type: ignore[misc]


class AsyncRead(_ByAsynchronousProxy, Read):
    __slots__ = ()


class AsyncMoved(_ByAsynchronousProxy, Moved):
    __slots__ = ()


class AsyncWrite(_ByAsynchronousProxy, Write):
    __slots__ = ()


class Completion:
    """The scheduler's choice to let one asynchronous operation of `by` come to its end.

    `name` is the same in every run.
    """

    __slots__ = ("_by", "_end", "name", "rank")
    blocked = None

    def __init__(self, by: SharedAccess, end: Callable[[], None]) -> None:
        self.rank = by.rank
        self.name = by.new_name()
        self._by, self._end = by, end
        by.gave(self)
        by.scheduler.make_ready(self)

    def step(self) -> None:
        self._by.took(self)
        self._end()


class _Copy:
    """A copy by threads that do not wait for it, of `values` to `view`."""

    def __init__(self, agent: int, view: View, values: np.ndarray) -> None:
        self.agent = agent
        self.view = view
        self.values = values
        self.is_done = False

    def end(self) -> None:
        if not self.is_done:
            self.is_done = True
            self.view.put(self.values)


class SharedAccess(Threads):
    """`fenced` is what the program knew at its last fence, or learnt of others' fences."""

    # `begin_block` makes what these stand for; most programs share nothing and go without.
    fenced: Clock
    # What asynchronous operations do, by segments, and whose memory; partitions share it.
    under_way: dict[int, tuple[str, SharedMemory | None]] = MappingProxyType({})  # type: ignore[assignment]
    in_block = False
    name: tuple[object, ...]  # the same in every run
    _named = 0

    def begin_block(self) -> None:
        self.in_block = True
        self.fenced = Clock()
        self.under_way = {}
        self._products: deque[tuple[int, int, np.ndarray, Callable[[], None]]] = deque()
        self._groups: deque[list[_Copy]] = deque()
        self._copies: list[_Copy] = []  # of no group yet
        self._copied = Clock()  # all of them so far

    def enter_block(self) -> None:
        """Before anything in it is made."""
        if not self.in_block:
            self.begin_block()

    def new_name(self) -> tuple[object, ...]:
        """A name, the same in every run, for what it makes now."""
        self._named += 1
        return (*self.name, self._named)

    def gave(self, key: object) -> None:
        for watch in self.watches:
            watch.gave(key)

    def took(self, key: object) -> None:
        for watch in self.watches:
            watch.took(key)

    def past(self) -> Past:
        """What is known here and the own past, for others in the block."""
        return Past(self.publish(), self.fenced.copy())

    def inherit(self, past: Past) -> None:
        self.learn([past.known])
        self.fenced.join(past.fenced)

    def fence_async_shared(self, loc: int) -> None:
        self.fenced = self.publish()

    def _begun(self, loc: int, *memories: SharedMemory) -> tuple[int, int]:
        """The agent and segment of an operation; of the asynchronous proxy in `memories`."""
        agent = self.new_agent()
        for memory in memories:
            memory.asynchronous.add(agent)
        return agent, self.agents.segment(agent, 0, self.locations[loc])

    def _know(self, *agents: int) -> None:
        past = Clock()
        for agent in agents:
            past.learn(agent, 0)
        self.learn([past])

    # ------------------------------------------------------------------------------------------
    # Memory

    def allocate_shared(self, name, shape, dtype, values, loc):
        self.enter_block()
        view = SharedMemory(shape, dtype, self.rank, name).whole()
        if values is not None:
            self.local_store(view, values, loc)
        return view

    def _touch(self, kind, view: View, loc, segment=None) -> None:
        if view.lies_otherwise and issubclass(kind, Read):
            raise UnsupportedError(
                f"{view.memory.name} is read here as elements of another layout or type than it was"
                " written as: where they lie is not emulated",
                place=self.locations[loc],
            )
        window = Window(view.memory, view.data, view.shadow, view.address, None)
        self.touch_window(kind, window, loc, segment)

    def local_load(self, view, loc):
        self._touch(Read, view, loc)
        return view.values.copy()

    def local_store(self, view, values, loc):
        self._touch(Write, view, loc)
        view.put(values)

    def local_gather(self, view, indices, axis, loc):
        """Of each line along the axis the elements that are named; all of it counts as read."""
        self._touch(Read, view, loc)
        return np.take_along_axis(view.values, self._within(view, indices, axis, loc), axis)

    def local_scatter(self, view, values, indices, axis, loc):
        """The same in the other direction; all of it counts as written, and keeps its values."""
        indices = self._within(view, indices, axis, loc)
        self._touch(Write, view, loc)
        whole = view.values.copy()
        np.put_along_axis(whole, indices, np.broadcast_to(values, indices.shape), axis)
        view.put(whole)

    def _within(self, view, indices, axis, loc) -> np.ndarray:
        extent = view.shape[axis]
        beyond = indices[(indices < 0) | (indices >= extent)]
        if beyond.size:
            self.fail(
                OutOfBoundsError, "out of bounds",
                f"element {beyond[0]} along axis {axis} of {tensor_name(view.memory)}, which has"
                f" {extent}", loc,
                remedy="keep the indices within the axis",
            )  # fmt: skip
        return indices.astype(np.int64)

    def shared_reinterpret(self, view, dtype, shape, before, after, loc):
        """`before` and `after` say how elements lie (operations/gluon.py)."""
        other = view.reinterpreted(dtype, shape, before, after)
        if other is None:
            raise UnsupportedError(
                f"the emulator sees whole pieces of shared memory as other elements: this view of"
                f" {view.memory.name} has shape {view.shape}, and not {shape} {dtype} elements",
                place=self.locations[loc],
            )
        return other

    def shared_index(self, view, index, loc):
        """Indices of operations that are not done, by their predicates, may be anything."""
        if 0 <= index < view.shape[0]:
            return self._even(view, view.part(int(index)), loc)
        name = tensor_name(view.memory)
        return Beyond(lambda: self.fail(
            OutOfBoundsError, "out of bounds",
            f"slot {index} of {name}, which has {view.shape[0]}", loc,
            remedy="take the index modulo the number of slots: % rounds towards zero",
        ))  # fmt: skip

    def shared_part(self, view, slices, loc):
        return self._even(view, view.part(slices), loc)

    def shared_transpose(self, view, order, loc):
        return self._even(view, view.transposed(order), loc)

    def _even(self, view, part, loc):
        if part is None:
            raise UnsupportedError(
                f"the emulator takes no part of {view.memory.name} after axes have been put"
                " together that do not lie behind each other: take the part first",
                place=self.locations[loc],
            )
        return part

    def unfenced(self, memory, cell, what, writer, loc) -> None:
        """TMA or a tensor core accesses what a thread has written before, but without a fence."""
        index = index_of(memory, cell)
        self._file(
            f"this {what} of {element_name(memory, index)} is by the asynchronous proxy, and no"
            " fence lets it see what threads have written", writer, loc,
            f"{what}s by TMA or a tensor core", "wrote",
            "fence_async_shared() behind the write, before the barrier or the operation",
            tensor=tensor_name(memory), index=index,
        )  # fmt: skip

    def _file(self, message, segment, loc, note, other, remedy, **where) -> None:
        agents, findings = self.agents, self.findings
        first = findings.side(self, self.locations[loc], note=note, **where)
        second = findings.side_of(
            agents.segment_agent[segment], agents.segment_place[segment], note=other, **where
        )
        findings.find(Finding("race", message, first, second, remedy))

    def leave_shared(self, views: Sequence[View] | None = None) -> None:
        """The block ends: nothing may be under way to its memory, or from it. With `views` nobody
        names these any more: Triton may keep there what it exchanges between threads.

        What is over, but not waited for, might as well be under way.
        """
        left = None if views is None else [view.memory for view in views]
        ends, whose = "a program ends", "another program's"
        if left is not None:
            ends, whose = "partitions end", "free for other uses"
        for segment, (what, memory) in [*self.under_way.items()]:
            if self.agents.known(segment, self.clock) or (left is not None and memory not in left):
                continue
            del self.under_way[segment]
            place = self.agents.segment_place[segment]
            side = self.findings.side(self, place, note="begins it, and it is under way")
            self.findings.find(
                Finding(
                    "race", f"{ends} before {what}, which then is {whose}", side,
                    remedy="wait for it before the end: mbarrier.wait for loads and for what"
                    " tcgen05_commit follows, tma.store_wait(0) for stores, in the partition that"
                    " began them",
                )
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------
    # mbarriers

    def init_barrier(self, view, count, loc):
        self.touch_element(Write, view.memory, view.cell, 8, loc)
        earlier = view.memory.barriers.get(view.cell)
        if earlier is not None and earlier.is_in_use:
            name = element_name(view.memory, index_of(view.memory, view.cell))
            self.findings.failure(
                self, SignalError, "lost signal",
                f"{name} begins anew in the middle of phase {earlier.ended}, which has {earlier}",
                self.locations[loc], "wait for the phase, and mbarrier.invalidate it, before"
                " mbarrier.init",
            )  # fmt: skip
        view.memory.barriers[view.cell] = Barrier(count, self.new_name())
        view.data[...] = 0

    def inval_barrier(self, view, loc):
        self._barrier(view, loc, modifies=True)
        self.touch_element(Write, view.memory, view.cell, 8, loc)
        del view.memory.barriers[view.cell]

    def _barrier(self, view: View, loc, *, modifies: bool) -> Barrier:
        """The barrier that lies there, accessed."""
        memory, cell = view.memory, view.cell
        barrier = memory.barriers.get(cell)
        if barrier is None:
            name = element_name(memory, index_of(memory, cell))
            self.fail(
                UninitializedError, "uninitialised", f"{name} is no mbarrier here", loc,
                remedy="mbarrier.init it before anybody uses it, invalidate it behind all who do",
            )  # fmt: skip
        segment = self.segment(loc, Scope.DEVICE)
        self.touch_element(Atomic, memory, cell, 8, loc, segment, modifies=modifies)
        return barrier

    def arrive_barrier(self, view, count, predicate, loc, expects=0):
        if predicate:
            self.pause("add")
            barrier = self._barrier(view, loc, modifies=True)
            barrier.arriving.join(self.past())
            self._arrive(barrier, view, count, loc, -expects)

    def barrier_expect(self, view, num_bytes, predicate, loc):
        self.arrive_barrier(view, 1, predicate, loc, num_bytes)

    def _arrive(self, barrier: Barrier, view: View, count: int, loc, num_bytes: int = 0) -> None:
        """So many arrivals, and bytes that have come; the phase may end with them."""
        memory, cell, ended = view.memory, view.cell, barrier.ended
        # Of what a phase has, any order ends it with the last; of more, the order says what is
        # in this phase and what in the next.
        commutes = count <= barrier.pending and num_bytes <= barrier.bytes
        if count > barrier.pending:
            name = element_name(memory, index_of(memory, cell))
            self.findings.failure(
                self, SignalError, "doubled signal",
                f"{counted(count, 'arrival')} at {name}, of which phase {ended} has {barrier}",
                self.locations[loc], "mbarrier.init it for all who arrive in a phase, or wait for"
                " the phase before arriving at the next",
            )  # fmt: skip
            count = barrier.pending
        barrier.pending -= count
        barrier.bytes -= num_bytes
        ends = barrier.ends_phase()
        for watch in self.watches:
            watch.arrived(self, barrier, ended, commutes)
        if ends:
            memory.view(numerics.i64)[cell] = barrier.ended
            self.waiters.word_changed(memory, cell, self.locations[loc])

    def wait_barrier(self, view, parity, predicate, loc):
        """Wait while the phase that is on has this parity: the one before has not."""
        if not predicate:
            return
        barrier, memory, cell = self._barrier(view, loc, modifies=False), view.memory, view.cell

        def is_on() -> bool:
            return (barrier.ended ^ int(parity)) & 1 == 0

        self.pause("wait", is_on)
        while is_on():
            index, ended = index_of(memory, cell), barrier.ended
            self.waiting = Waiting(memory, cell, index, self.locations[loc], ended + 1, ended)
            self.waiters.add(self)
            self.scheduler.hub.switch()
        self.blocked = None
        for watch in self.watches:
            watch.phase_over(self, barrier)
        self.inherit(barrier.past)

    # ------------------------------------------------------------------------------------------
    # Copies

    def copy_async(self, pointers, mask, view, loc):
        agent, segment = self._begun(loc)
        dtype = view.data.dtype
        values = self.load(pointers, mask, None, dtype, view.shape, loc, segment=segment)
        self._touch(Write, view, loc, segment)
        self._copies.append(_Copy(agent, view, values))
        self._copied.learn(agent, 0)

    def async_commit_group(self, loc):
        self._groups.append(self._copies)
        self._copies = []

    def async_wait(self, pending, loc):
        while len(self._groups) > pending:
            copies = self._groups.popleft()
            for copy in copies:
                copy.end()
            self._know(*(copy.agent for copy in copies))

    def copies_arrive(self, view, threads, no_increment, loc):
        if not no_increment:
            self.pause("update")
        barrier = self._barrier(view, loc, modifies=True)
        self._copies = [copy for copy in self._copies if not copy.is_done]
        copies = [*(copy for group in self._groups for copy in group), *self._copies]
        copied = self._copied.copy()
        if not no_increment:
            barrier.pending += threads
            for watch in self.watches:
                watch.arrived(self, barrier, barrier.ended, False)

        def arrive() -> None:
            for copy in copies:
                copy.end()
            barrier.arriving.known.join(copied)
            self._arrive(barrier, view, threads, loc)

        Completion(self, arrive)

    # ------------------------------------------------------------------------------------------
    # Products

    def multiply_async(self, a, b, c, use, is_async, loc):
        views = [operand for operand in (a, b) if isinstance(operand, View)]
        agent, segment = self._begun(loc, *(view.memory for view in views))
        for view in views:
            self._touch(AsyncRead, view, loc, segment)
        sums = np.empty(c.shape, c.dtype)
        sums.view(np.uint8).fill(0xFF)  # what nobody may look at yet: NaN
        self._products.append((agent, segment, sums, partial(_multiply, a, b, c, use, sums)))
        if not is_async:
            self.products_wait(0, loc)
        return sums

    def products_wait(self, pending, loc):
        while len(self._products) > pending:
            agent, *_, multiply = self._products.popleft()
            multiply()
            self._know(agent)

    def settled(self, value, loc):
        """`value` is looked at: no product may be under way to it."""
        for _, segment, sums, _ in self._products:
            if sums is value:
                self._file(
                    "sums are used here while tensor cores still add to them", segment, loc,
                    "uses", "began the product",
                    "warpgroup_mma_wait for it first, with fewer products left under way",
                )  # fmt: skip


def _multiply(a: Any, b: Any, c: np.ndarray, use: bool, sums: np.ndarray) -> None:
    left, right = (one.values if isinstance(one, View) else one for one in (a, b))
    product(left, right, c, use, sums)


def product(left: np.ndarray, right: np.ndarray, c: Any, use: bool, sums: np.ndarray) -> None:
    """left @ right + c, as tensor cores compute it; without c where it is not used."""
    if left.dtype == numerics.f32:
        left, right = numerics.tf32(left), numerics.tf32(right)
    wide = numerics.i64 if left.dtype.kind in "iu" else numerics.f64
    new = np.matmul(left.astype(wide), right.astype(wide)).astype(sums.dtype)
    sums[...] = new + c if use else new
