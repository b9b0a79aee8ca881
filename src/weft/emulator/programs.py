"""One program of a kernel: the context that generated code calls for everything with an effect.

A program is a coroutine. It runs undisturbed between synchronising operations, which is enough:
whether two plain accesses race does not depend on when they run but on what orders them, and only
synchronising operations order. At those the program may be set aside, and another one runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import greenlet

from weft.base.errors import FarPointerError, NotSymmetricError, PeerError, UnsupportedError
from weft.base.place import UNKNOWN, Place
from weft.base.vocabulary import Order, Scope, SignalOp
from weft.emulator.clocks import Agents, Clock, Identity
from weft.emulator.memory import Allocation
from weft.language.triton_api import TRITON_VERSION

if TYPE_CHECKING:
    from weft.emulator.machine import Machine
    from weft.emulator.streams import KernelWork

# From this version on a release by tl.atomic_* completes the program's asynchronous stores.
RELEASE_COMPLETES_STORES = TRITON_VERSION >= (3, 8)

# A scalar that is loaded this often in a row, from one line, with nothing in between, is a spin.
SPIN_LIMIT = 64

_ORDERS = {order.value: order for order in Order}
_SCOPES = {scope.value: scope for scope in Scope}


class Killed(Exception):
    """Ends one program; what was wrong has been reported."""


@dataclass
class Waiting:
    """What a program that was set aside waits for; `expected` is None for a raw spin."""

    allocation: Allocation
    cell: int
    index: Any
    place: Place
    expected: int | None
    seen: int
    count: int = 1


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor: base address, sizes and strides in elements, the block it moves."""

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    dtype: np.dtype
    padding: str = "zero"


class Program:
    """The `rt` of generated code; see the module's words."""

    def __init__(self, machine: Machine, work: KernelWork, pid: tuple[int, int, int]) -> None:
        self.machine = machine
        self.memory = machine.memory
        self.shadow = machine.shadow
        self.agents = machine.agents
        self.work = work
        self.rank = work.rank
        self.pid = tuple(np.int32(i) for i in pid)
        self.grid = work.grid_values
        self.program = pid
        self.locations = work.kernel.locations
        identity = Identity(work.rank, work.kernel.name, pid)
        self.agent = self.agents.add(identity, work.stream.number, work.position)
        self.clk = 0
        self.clock = work.clock  # shared until this program learns something
        self.segments: dict[Any, int] = {}
        self.async_agent = -1
        self.async_clk = 0
        self.async_done = -1
        self.waiting: Waiting | None = None
        self._last_spin: tuple[int, int] | None = None
        self._spins = 0
        self._last_poll: tuple[int, int, Any] | None = None
        self._found: Allocation | None = None
        self._far_ranks: frozenset[int] = frozenset()  # put to, or got from, by this program
        self.coroutine = greenlet(self._run, machine.hub)

    def _run(self) -> None:
        try:
            self.work.kernel.function(self, *self.work.args)
        except Killed:
            pass
        self.machine.program_ended(self)

    def step(self) -> None:
        self.waiting = None
        self.coroutine.switch()

    # ------------------------------------------------------------------------------------------
    # Knowledge

    def owns(self, segment: int) -> bool:
        agent = self.agents.segment_agent[segment]
        return agent == self.agent or agent == self.async_agent

    def segment(self, loc: int, scope: Scope | None = None) -> int:
        """The number of what this program does now at `loc`."""
        key = loc if scope is None else (loc, scope)
        segment = self.segments.get(key)
        if segment is None:
            place = self.locations[loc]
            segment = self.agents.segment(self.agent, self.clk, place, scope)
            self.segments[key] = segment
        return segment

    def async_segment(self, loc: int) -> int:
        """The same for an asynchronous (descriptor) store."""
        key = ("async", loc, self.async_clk)
        segment = self.segments.get(key)
        if segment is None:
            if self.async_agent < 0:
                identity = self.agents.identity[self.agent]
                self.async_agent = self.agents.add(
                    identity, self.work.stream.number, self.work.position
                )
            segment = self.agents.segment(self.async_agent, self.async_clk, self.locations[loc])
            self.segments[key] = segment
        return segment

    def complete_stores(self) -> None:
        """All asynchronous stores so far are done, as seen by this program's releases."""
        if self.async_agent >= 0:
            self.async_done = self.async_clk
            self.async_clk += 1

    def learn(self, clocks: list[Clock]) -> None:
        if not clocks:
            return
        if self.clock is self.work.clock:
            self.clock = self.clock.copy()
        for clock in clocks:
            self.clock.join(clock)

    def publish(self) -> Clock:
        """What a release hands over: all that this program knows, and its own past."""
        clock = self.clock.copy()
        clock.agents[self.agent] = self.clk
        if self.async_done >= 0:
            clock.agents[self.async_agent] = self.async_done
        self.clk += 1
        self.segments.clear()
        return clock

    def pause(self) -> None:
        """A point at which the scheduler may let somebody else go first."""
        if self.machine.preempts():
            self.machine.make_ready(self)
            self.machine.hub.switch()

    # ------------------------------------------------------------------------------------------
    # Finding memory

    def _find(self, lo: int, hi: int, loc: int) -> Allocation | None:
        """The one allocation that holds lo .. hi - 1, if there is one."""
        found = self._found
        if found is not None and found.address <= lo and hi <= found.end and found.buffer:
            return found
        found = self.memory.find(lo)
        if found is None or hi > found.end:
            return None
        if found.rank != self.rank and found.heap_offset is not None:
            self._check_reach(found, loc)
        # Symmetric memory may be freed under a program's feet; only plain hits are remembered.
        self._found = found if found.heap_offset is None else None
        return found

    def _check_reach(self, found: Allocation, loc: int) -> None:
        """Memory of another node is reached by the one-sided primitives alone."""
        machine = self.machine
        if machine.num_nodes == 1 or found.rank in self._far_ranks:
            return
        if machine.node_of(found.rank) != machine.node_of(self.rank):
            self.fail(
                FarPointerError, "far pointer",
                f"rank {found.rank} is on another node: rank {self.rank} cannot dereference"
                f" {found.name} there", loc,
                remedy="use wl.put, wl.get or wl.put_signal, or ask wl.is_near first",
            )  # fmt: skip

    def _out_of_bounds(self, address: int, itemsize: int, what: str, loc: int) -> None:
        near = self.memory.nearest(address)
        self.machine.report_out_of_bounds(self, near, address, itemsize, what, loc)

    # ------------------------------------------------------------------------------------------
    # Shadow memory

    def _cells(self, allocation: Allocation, index: np.ndarray, itemsize: int) -> np.ndarray:
        """Element numbers of `itemsize` as cell numbers of the allocation's shadow."""
        if itemsize < allocation.cell_bytes:
            allocation.refine(itemsize)
        if itemsize == allocation.cell_bytes:
            return index
        factor = itemsize // allocation.cell_bytes
        return index[..., None] * factor + np.arange(factor)

    def _touch(self, allocation: Allocation, shadow: np.ndarray, access: _Access) -> None:
        """Take every cell of `shadow` (a view or a copy) through `access`.

        Returns nothing; the caller's view is changed in place.
        """
        first = shadow.item(0)
        if (shadow == first).all():
            after = access(first)
            if after != first:
                shadow[...] = after
            return
        for number in np.unique(shadow).tolist():
            after = access(number)
            if after != number:
                shadow[shadow == number] = after

    def _touch_gathered(self, allocation: Allocation, cells: np.ndarray, access: _Access) -> None:
        shadow = allocation.shadow.take(cells)
        first = shadow.item(0)
        if (shadow == first).all():
            after = access(first)
            if after != first:
                allocation.shadow[cells] = after
            return
        before = shadow.copy()
        for number in np.unique(before).tolist():
            shadow[before == number] = access(number)
        allocation.shadow[cells] = shadow

    # ------------------------------------------------------------------------------------------
    # Plain loads and stores

    def load(self, ptr, mask, other, dtype, shape, loc, volatile=False):
        if shape == ():
            return self._load_scalar(ptr, mask, other, dtype, loc, volatile)
        itemsize = dtype.itemsize
        if mask is not None:
            if np.all(mask):
                mask = None
            else:
                mask = np.broadcast_to(mask, shape)
                filled = np.empty(shape, dtype)
                filled[...] = 0 if other is None else other
                chosen = np.broadcast_to(ptr, shape)[mask]
                if chosen.size:
                    filled[mask] = self._gather(chosen, dtype, itemsize, loc)
                return filled
        if not isinstance(ptr, np.ndarray):
            ptr = np.full((1,) * len(shape), ptr, np.int64)
        values = self._gather(ptr, dtype, itemsize, loc)
        return values if values.shape == shape else np.broadcast_to(values, shape)

    def _gather(self, ptr: np.ndarray, dtype: np.dtype, itemsize: int, loc: int) -> np.ndarray:
        lo, hi = int(ptr.min()), int(ptr.max())
        allocation = self._find(lo, hi + itemsize, loc)
        if allocation is None:
            return self._gather_scattered(ptr, dtype, itemsize, loc)
        index = ptr - allocation.address
        if itemsize > 1:
            index //= itemsize
        values = allocation.view(dtype).take(index)
        if self.machine.checks:
            cells = self._cells(allocation, index, itemsize)
            self._touch_gathered(allocation, cells, _Read(self, allocation, loc, cells))
        return values

    def _gather_scattered(self, ptr, dtype, itemsize, loc) -> np.ndarray:
        """Lanes that lie in several allocations, or in none."""
        values = np.zeros(ptr.shape, dtype)
        for lanes, _allocation in self._by_allocation(ptr, itemsize, "reads", loc):
            values[lanes] = self._gather(ptr[lanes], dtype, itemsize, loc)
        return values

    def _by_allocation(self, ptr: np.ndarray, itemsize: int, what: str, loc: int):
        left = np.ones(ptr.shape, bool)
        while left.any():
            address = int(ptr[left][0])
            allocation = self.memory.find(address)
            if allocation is None or address + itemsize > allocation.end:
                self._out_of_bounds(address, itemsize, what, loc)
                near = self.memory.nearest(address)
                bad = np.vectorize(
                    lambda a: (
                        (found := self.memory.find(int(a))) is None or int(a) + itemsize > found.end
                    )
                )(ptr)
                left &= ~bad
                if near is None:
                    return
                continue
            lanes = left & (ptr >= allocation.address) & (ptr + itemsize <= allocation.end)
            left &= ~lanes
            yield lanes, allocation

    def _locate_scalar(self, ptr, itemsize: int, what: str, loc: int):
        """(allocation, element index) of one address; None when it is out of bounds."""
        address = int(ptr)
        allocation = self._find(address, address + itemsize, loc)
        if allocation is None:
            self._out_of_bounds(address, itemsize, what, loc)
            return None
        if itemsize < allocation.cell_bytes:
            allocation.refine(itemsize)
        return allocation, (address - allocation.address) // itemsize

    def _touch_scalar(self, allocation, index, itemsize, access: _Access) -> int:
        """Take one element's cells through `access`; returns its first cell."""
        factor = itemsize // allocation.cell_bytes
        first = index * factor
        for cell in range(first, first + factor):
            number = allocation.shadow.item(cell)
            after = access(number)
            if after != number:
                allocation.shadow[cell] = after
        return first

    def _load_scalar(self, ptr, mask, other, dtype, loc, volatile):
        if mask is not None and not mask:
            return dtype.type(0 if other is None else other)
        located = self._locate_scalar(ptr, dtype.itemsize, "reads", loc)
        if located is None:
            return dtype.type(0)
        allocation, index = located
        if volatile:
            return self._atomic(
                allocation, index, dtype, loc, Order.RELAXED, Scope.SYSTEM, lambda old: old
            )
        if self.machine.checks:
            cells = np.array([index * (dtype.itemsize // allocation.cell_bytes)])
            self._touch_scalar(
                allocation, index, dtype.itemsize, _Read(self, allocation, loc, cells)
            )
        value = allocation.view(dtype)[index]
        spin = (loc, int(ptr))
        self._spins = self._spins + 1 if spin == self._last_spin else 0
        self._last_spin = spin
        if self._spins > SPIN_LIMIT:
            self.machine.report_plain_spin(self, allocation, index, loc)
            self._poll(allocation, index, dtype, loc, value)
        return value

    def store(self, ptr, value, mask, dtype, shape, loc):
        self._last_spin = None
        itemsize = dtype.itemsize
        if shape == ():
            if mask is not None and not mask:
                return
            located = self._locate_scalar(ptr, itemsize, "writes", loc)
            if located is None:
                return
            allocation, index = located
            if self.machine.checks:
                cells = np.array([index * (itemsize // allocation.cell_bytes)])
                segment = self.segment(loc)
                self._touch_scalar(
                    allocation, index, itemsize, _Write(self, allocation, loc, cells, segment)
                )
            allocation.view(dtype)[index] = value
            if allocation.sync:
                self._plain_write_to_words(allocation, index * itemsize, itemsize)
            return
        ptr = np.broadcast_to(ptr, shape)
        value = np.broadcast_to(value, shape)
        if mask is not None and not np.all(mask):
            mask = np.broadcast_to(mask, shape)
            ptr, value = ptr[mask], value[mask]
        if ptr.size:
            self._scatter(ptr, value, dtype, itemsize, loc)

    def _scatter(self, ptr, value, dtype, itemsize, loc) -> None:
        lo, hi = int(ptr.min()), int(ptr.max())
        allocation = self._find(lo, hi + itemsize, loc)
        if allocation is None:
            for lanes, _ in self._by_allocation(ptr, itemsize, "writes", loc):
                self._scatter(ptr[lanes], value[lanes], dtype, itemsize, loc)
            return
        index = ptr - allocation.address
        if itemsize > 1:
            index //= itemsize
        if self.machine.checks:
            cells = self._cells(allocation, index, itemsize)
            segment = self.segment(loc)
            self._touch_gathered(allocation, cells, _Write(self, allocation, loc, cells, segment))
        allocation.view(dtype)[index] = value
        if allocation.sync:
            self._plain_write_to_words(allocation, lo - allocation.address, hi - lo + itemsize)

    def _plain_write_to_words(self, allocation: Allocation, start: int, nbytes: int) -> None:
        """A plain store over signal words publishes nothing, but waiters do see it."""
        for cell in list(allocation.sync):
            offset = cell * allocation.cell_bytes
            if start <= offset < start + nbytes:
                allocation.sync[cell].published.clear()
                self.machine.word_changed(allocation, cell)

    # ------------------------------------------------------------------------------------------
    # Descriptors

    def make_descriptor(self, base, sizes, strides, block_shape, dtype, padding, loc):
        return Descriptor(
            int(base), tuple(map(int, sizes)), tuple(map(int, strides)), tuple(block_shape),
            dtype, padding or "zero",
        )  # fmt: skip

    def _window(self, desc: Descriptor, indices) -> tuple[list[slice], tuple[int, ...], int]:
        """(slices of the block inside the tensor, its valid shape, first address)."""
        inside, shape, address = [], [], desc.base
        itemsize = desc.dtype.itemsize
        for index, size, stride, extent in zip(
            indices, desc.sizes, desc.strides, desc.block, strict=True
        ):
            start = int(index)
            lo, hi = max(start, 0), min(start + extent, size)
            inside.append(slice(lo - start, max(hi, lo) - start))
            shape.append(max(hi - lo, 0))
            address += lo * stride * itemsize
        return inside, tuple(shape), address

    def _strided(self, desc: Descriptor, shape, address: int, what: str, loc: int):
        """(allocation, data view, shadow view) of a window; None when it is out of bounds."""
        itemsize = desc.dtype.itemsize
        span = sum((n - 1) * s for n, s in zip(shape, desc.strides, strict=True)) * itemsize
        allocation = self._find(address, address + span + itemsize, loc)
        if allocation is None:
            beyond = self.memory.find(address)
            bad = address if beyond is None else beyond.end
            self._out_of_bounds(bad, itemsize, what, loc)
            return None
        if itemsize < allocation.cell_bytes:
            allocation.refine(itemsize)
        offset = address - allocation.address
        steps = tuple(s * itemsize for s in desc.strides)
        data = np.ndarray(shape, desc.dtype, allocation.buffer, offset, steps)
        cell_bytes = allocation.cell_bytes
        if itemsize == cell_bytes:
            shadow = np.ndarray(
                shape, np.int32, allocation.shadow, offset // cell_bytes * 4,
                tuple(s * 4 for s in desc.strides),
            )  # fmt: skip
        else:
            factor = itemsize // cell_bytes
            shadow = np.ndarray(
                (*shape, factor), np.int32, allocation.shadow, offset // cell_bytes * 4,
                (*(s * factor * 4 for s in desc.strides), 4),
            )  # fmt: skip
        return allocation, data, shadow

    def _first_cell(self, allocation: Allocation, address: int) -> np.ndarray:
        return np.array([(address - allocation.address) // allocation.cell_bytes])

    def descriptor_load(self, desc: Descriptor, indices, shape, loc):
        inside, valid, address = self._window(desc, indices)
        if 0 in valid:
            return self._padded(desc, desc.block).reshape(shape)
        found = self._strided(desc, valid, address, "reads", loc)
        if found is None:
            return self._padded(desc, desc.block).reshape(shape)
        allocation, data, shadow = found
        if self.machine.checks:
            cells = self._first_cell(allocation, address)
            self._touch(allocation, shadow, _Read(self, allocation, loc, cells, shadow=shadow))
        if valid == desc.block:
            return data.reshape(shape) if shape != desc.block else data.copy()
        block = self._padded(desc, desc.block)
        block[tuple(inside)] = data
        return block.reshape(shape)

    def _padded(self, desc: Descriptor, shape) -> np.ndarray:
        if desc.padding == "nan":
            return np.full(shape, np.nan, desc.dtype)
        return np.zeros(shape, desc.dtype)

    def descriptor_store(self, desc: Descriptor, indices, value, loc):
        inside, valid, address = self._window(desc, indices)
        if 0 in valid:
            return
        found = self._strided(desc, valid, address, "writes", loc)
        if found is None:
            return
        allocation, data, shadow = found
        if self.machine.checks:
            cells = self._first_cell(allocation, address)
            segment = self.async_segment(loc)
            self._touch(allocation, shadow, _Write(self, allocation, loc, cells, segment, shadow))
        data[...] = np.asarray(value).reshape(desc.block)[tuple(inside)]

    # ------------------------------------------------------------------------------------------
    # Atomic accesses and waiting

    def _atomic(self, allocation, index, dtype, loc, order, scope, change, *, replaces=False):
        """One atomic access: `change(old)` is the new value. Returns the old one.

        `replaces` says that it is a store: what earlier releases published ends with it.
        """
        self._last_spin = None
        self.pause()
        view = allocation.view(dtype)
        old = view[index]
        new = change(old)
        modifies = new != old or replaces
        cell = index * (dtype.itemsize // allocation.cell_bytes)
        if self.machine.checks:
            segment = self.segment(loc, scope)
            access = _Atomic(self, allocation, loc, np.array([cell]), segment, bool(modifies))
            self._touch_scalar(allocation, index, dtype.itemsize, access)
        word = allocation.sync_word(cell)
        if order.acquires:
            self.learn(word.acquire(self.rank, scope))
        if replaces:
            word.published.clear()
        if order.releases:
            if RELEASE_COMPLETES_STORES:
                self.complete_stores()
            word.release(self.rank, scope, self.publish())
        if modifies:
            view[index] = new
            self.machine.word_changed(allocation, cell, self, loc)
        else:
            self._poll(allocation, index, dtype, loc, old)
        return old

    def _poll(self, allocation, index, dtype, loc, value) -> None:
        """An access that changed nothing: set the program aside if it is going round in a spin."""
        poll = (loc, allocation.address + index * dtype.itemsize, value.item())
        if poll != self._last_poll:
            self._last_poll = poll
            return
        cell = index * (dtype.itemsize // allocation.cell_bytes)
        self.waiting = Waiting(
            allocation, cell, allocation.index(poll[1], dtype.itemsize), self.locations[loc],
            None, value.item(),
        )  # fmt: skip
        self._last_poll = None
        self.machine.set_aside(self)

    def atomic_rmw(self, op, sem, scope, ptr, value, mask, dtype, shape, loc):
        order, scope = _ORDERS[sem], _SCOPES[scope]
        change = _RMW[op]
        if shape == ():
            if mask is not None and not mask:
                return dtype.type(0)
            located = self._locate_scalar(ptr, dtype.itemsize, "updates", loc)
            if located is None:
                return dtype.type(0)
            allocation, index = located
            return self._atomic(
                allocation, index, dtype, loc, order, scope,
                lambda old: change(old, value, dtype),
            )  # fmt: skip
        return self._atomic_tile(
            order, scope, ptr, mask, dtype, shape, loc,
            lambda old, values: change(old, values, dtype), value,
        )  # fmt: skip

    def atomic_cas(self, sem, scope, ptr, compare, value, dtype, shape, loc):
        order, scope = _ORDERS[sem], _SCOPES[scope]
        if shape == ():
            located = self._locate_scalar(ptr, dtype.itemsize, "updates", loc)
            if located is None:
                return dtype.type(0)
            allocation, index = located
            return self._atomic(
                allocation, index, dtype, loc, order, scope,
                lambda old: value if old == compare else old,
            )  # fmt: skip
        pairs = np.stack([np.broadcast_to(compare, shape), np.broadcast_to(value, shape)], axis=-1)
        return self._atomic_tile(
            order, scope, ptr, None, dtype, shape, loc,
            lambda old, pair: pair[1] if old == pair[0] else old, pairs,
        )  # fmt: skip

    def _atomic_tile(self, order, scope, ptr, mask, dtype, shape, loc, change, values):
        """Lanes one after the other, in an order that nobody may rely on."""
        self.pause()
        result = np.zeros(shape, dtype)
        ptr = np.broadcast_to(ptr, shape)
        mask = np.broadcast_to(True if mask is None else mask, shape)
        values = np.broadcast_to(values, (*shape, *np.shape(values)[len(shape) :]))
        segment = self.segment(loc, scope)
        learnt: list[Clock] = []
        touched: set[tuple[int, int]] = set()
        words = []
        for lane in np.argwhere(mask):
            lane = tuple(lane)
            located = self._locate_scalar(ptr[lane], dtype.itemsize, "updates", loc)
            if located is None:
                continue
            allocation, index = located
            view = allocation.view(dtype)
            old = view[index]
            new = change(old, values[lane])
            result[lane] = old
            cell = index * (dtype.itemsize // allocation.cell_bytes)
            if self.machine.checks:
                access = _Atomic(self, allocation, loc, np.array([cell]), segment, True)
                self._touch_scalar(allocation, index, dtype.itemsize, access)
            view[index] = new
            if (id(allocation), cell) not in touched:
                touched.add((id(allocation), cell))
                words.append((allocation, cell))
                if order.acquires and cell in allocation.sync:
                    learnt += allocation.sync[cell].acquire(self.rank, scope)
        self.learn(learnt)
        clock = self.publish() if order.releases else None
        for allocation, cell in words:
            if clock is not None:
                allocation.sync_word(cell).release(self.rank, scope, clock.copy())
            self.machine.word_changed(allocation, cell, self, loc)
        return result

    # ------------------------------------------------------------------------------------------
    # What wl's primitives become

    def extern(self, symbol, args, dtype, shape, loc):
        name, _, static = symbol.partition(":")
        handler = _EXTERNS.get(name)
        if handler is None:
            raise UnsupportedError(
                f"the emulator does not know the external function {symbol!r}; it runs weft's own"
                " primitives and plain Triton",
                place=self.locations[loc],
            )
        return handler(self, args, static.split("."), dtype, shape, loc)

    def _translate(self, args, static, dtype, shape, loc, far_allowed=False):
        ptr, table, peer = args
        heap = self.machine.heap_of(int(table))
        peer = int(peer)
        if not 0 <= peer < heap.num_ranks:
            self.fail(
                PeerError, "peer",
                f"peer {peer} is outside the world's ranks 0 .. {heap.num_ranks - 1}", loc,
                remedy="compute the peer modulo wl.num_ranks(world)",
            )  # fmt: skip
        lo, hi = int(np.min(ptr)), int(np.max(ptr))
        own = heap.bases[heap.rank]
        if not (own <= lo and hi < own + heap.nbytes):
            found = self.memory.find(lo)
            what = f"{found.name} of rank {found.rank}" if found else f"address {lo:#x}"
            self.fail(
                NotSymmetricError, "not symmetric",
                f"{what} is not on rank {heap.rank}'s symmetric heap, so it has no address on"
                f" rank {peer}", loc,
                remedy="allocate it with world.empty(...) or world.signals(...)",
            )  # fmt: skip
        if not heap.near[peer] and not far_allowed:
            self.fail(
                FarPointerError, "far pointer",
                f"rank {peer} is on another node: rank {heap.rank} cannot dereference its memory",
                loc, remedy="use wl.put, wl.get or wl.put_signal, or ask wl.is_near first",
            )  # fmt: skip
        delta = heap.bases[peer] - own
        if not heap.near[peer]:
            target = self.memory.find(lo + delta)
            if target is not None:
                self._far_ranks = self._far_ranks | {target.rank}
        return ptr + np.int64(delta)

    def fail(self, error: type, kind: str, message: str, loc: int, *, remedy: str) -> None:
        """Report something after which this program cannot go on, and end it."""
        self.machine.report_failure(self, error, kind, message, self.locations[loc], remedy)
        raise Killed

    def _notify(self, args, static, dtype, shape, loc):
        ptr, value = args
        operation, order, scope = static
        kind = np.dtype(np.int64) if np.asarray(value).dtype.itemsize == 8 else None
        located = self._locate_word(ptr, kind, "signals", loc)
        if located is None:
            return np.int32(0)
        allocation, index, kind = located
        self.complete_stores()
        value = kind.type(value)
        if operation == SignalOp.SET.value:
            self.machine.check_set(self, allocation, index, kind, value, loc)
            self._atomic(
                allocation, index, kind, loc, _ORDERS[order], _SCOPES[scope],
                lambda old: value, replaces=True,
            )  # fmt: skip
        else:
            self._atomic(
                allocation, index, kind, loc, _ORDERS[order], _SCOPES[scope],
                lambda old: _wrap_add(old, value, kind),
            )  # fmt: skip
        return np.int32(0)

    def _locate_word(self, ptr, kind: np.dtype | None, what: str, loc: int):
        """(allocation, index, dtype) of a signal word, whose width is that of its array."""
        allocation = self.memory.find(int(ptr))
        if kind is None or (allocation is not None and allocation.cell_bytes in (4, 8)):
            width = allocation.cell_bytes if allocation is not None else 4
            kind = np.dtype(np.int64 if width == 8 else np.int32)
        located = self._locate_scalar(ptr, kind.itemsize, what, loc)
        return None if located is None else (*located, kind)

    def _wait(self, args, static, dtype, shape, loc):
        ptr, at_least, count = args[:3]
        order, scope = _ORDERS[static[0]], _SCOPES[static[1]]
        for _i in range(int(count)):
            located = self._locate_word(ptr, None, "waits for", loc)
            if located is None:
                return np.int32(0)
            allocation, index, kind = located
            self._wait_word(allocation, index, kind, kind.type(at_least), order, scope, loc)
            ptr = ptr + np.int64(kind.itemsize)
        return np.int32(0)

    def _wait_word(self, allocation, index, kind, at_least, order, scope, loc) -> None:
        view = allocation.view(kind)
        cell = index * (kind.itemsize // allocation.cell_bytes)
        self.pause()
        while _behind(view[index], at_least, kind):
            self.waiting = Waiting(
                allocation, cell, allocation.index(
                    allocation.address + index * kind.itemsize, kind.itemsize
                ), self.locations[loc], int(at_least), int(view[index]),
            )  # fmt: skip
            self.machine.set_aside(self)
        if self.machine.checks:
            segment = self.segment(loc, scope)
            access = _Atomic(self, allocation, loc, np.array([cell]), segment, False)
            self._touch_scalar(allocation, index, kind.itemsize, access)
        if order.acquires:
            self.learn(allocation.sync_word(cell).acquire(self.rank, scope))

    def _test(self, args, static, dtype, shape, loc):
        ptr, at_least, count = args
        order, scope = _ORDERS[static[0]], _SCOPES[static[1]]
        passed = True
        for _i in range(int(count)):
            located = self._locate_word(ptr, None, "tests", loc)
            if located is None:
                return np.bool_(False)
            allocation, index, kind = located
            seen = self._atomic(allocation, index, kind, loc, order, scope, lambda old: old)
            passed = passed and not _behind(seen, kind.type(at_least), kind)
            ptr = ptr + np.int64(kind.itemsize)
        return np.bool_(passed)

    def _ordered_load(self, args, static, dtype, shape, loc):
        located = self._locate_scalar(args[0], dtype.itemsize, "reads", loc)
        if located is None:
            return dtype.type(0)
        order, scope = _ORDERS[static[0]], _SCOPES[static[1]]
        return self._atomic(*located, dtype, loc, order, scope, lambda old: old)

    def _ordered_store(self, args, static, dtype, shape, loc):
        ptr, value = args
        kind = np.asarray(value).dtype
        located = self._locate_scalar(ptr, kind.itemsize, "writes", loc)
        if located is not None:
            order, scope = _ORDERS[static[0]], _SCOPES[static[1]]
            self._atomic(
                *located, kind, loc, order, scope, lambda old: kind.type(value), replaces=True
            )
        return np.int32(0)

    def _complete(self, args, static, dtype, shape, loc):
        self.complete_stores()
        return np.int32(0)

    def _consume(self, args, static, dtype, shape, loc):
        return args[0]

    # ------------------------------------------------------------------------------------------
    # The rest

    def assert_(self, cond, message, loc):
        if not np.all(cond):
            self.fail(
                AssertionError, "assertion", f"device_assert failed: {message}", loc,
                remedy="the values above do not satisfy the kernel's own check",
            )  # fmt: skip

    def print_(self, prefix, values, loc):
        " ".join(str(value) for value in values)


# ---------------------------------------------------------------------------------------------
# Accesses: a history number in, a history number out


class _Access:
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
            self.program.machine.report_race(
                self.program, self.allocation, self._where(number), self.what, kind, earlier,
                self.program.locations[self.loc],
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


class _Read(_Access):
    __slots__ = ()
    what = "read"

    def __call__(self, number: int) -> int:
        program = self.program
        shadow = program.shadow
        after = shadow._reads.get((number, self.segment))
        if after is not None:
            return after
        if (
            shadow.histories[number].writer == Agents.NOTHING
            and not shadow.histories[number].others
        ):
            program.machine.report_uninitialised(
                program, self.allocation, self._where(number), program.locations[self.loc]
            )
        return shadow.after_read(
            number, self.segment, program.clock, program.owns, self.conflict(number)
        )


class _Write(_Access):
    __slots__ = ()
    what = "write"

    def __call__(self, number: int) -> int:
        program = self.program
        return program.shadow.after_write(
            number, self.segment, program.clock, program.owns, self.conflict(number)
        )


class _Atomic(_Access):
    __slots__ = ("modifies",)
    what = "atomic access"

    def __init__(self, program, allocation, loc, cells, segment, modifies: bool) -> None:
        super().__init__(program, allocation, loc, cells, segment)
        self.modifies = modifies

    def __call__(self, number: int) -> int:
        program = self.program
        history = program.shadow.histories[number]
        if history.writer == Agents.NOTHING and not history.others and not self.modifies:
            program.machine.report_uninitialised(
                program, self.allocation, self._where(number), program.locations[self.loc]
            )
        return program.shadow.after_atomic(
            number, self.segment, program.clock, program.owns, self.conflict(number),
            self.modifies,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Arithmetic of single words


def _behind(seen, expected, kind: np.dtype) -> bool:
    """Is `seen` before `expected`, modularly: signed(seen - expected) < 0?"""
    return int(_wrap_add(seen, -int(expected), kind)) < 0


def _wrap_add(old, value, dtype: np.dtype):
    if dtype.kind not in "iu":
        return dtype.type(old + value)
    bits = dtype.itemsize * 8
    total = (int(old) + int(value)) & ((1 << bits) - 1)
    if dtype.kind == "i" and total >> (bits - 1):
        total -= 1 << bits
    return dtype.type(total)


def _unsigned(function):
    def apply(old, value, dtype):
        kind = np.dtype(f"u{dtype.itemsize}")
        return function(old.view(kind), np.asarray(value, dtype).view(kind)[()]).view(dtype)

    return apply


_RMW = {
    "add": lambda old, value, dtype: _wrap_add(old, value, dtype),
    "fadd": lambda old, value, dtype: dtype.type(old + value),
    "and": lambda old, value, dtype: old & value,
    "or": lambda old, value, dtype: old | value,
    "xor": lambda old, value, dtype: old ^ value,
    "max": lambda old, value, dtype: max(old, value),
    "min": lambda old, value, dtype: min(old, value),
    "umax": _unsigned(max),
    "umin": _unsigned(min),
    "exch": lambda old, value, dtype: dtype.type(value),
}

_EXTERNS = {
    "weft.at": Program._translate,
    "weft.translate": lambda self, args, static, dtype, shape, loc: self._translate(
        args, static, dtype, shape, loc, far_allowed=True
    ),
    "weft.notify": Program._notify,
    "weft.wait": Program._wait,
    "weft.wait_bounded": Program._wait,
    "weft.test": Program._test,
    "weft.load": Program._ordered_load,
    "weft.store": Program._ordered_store,
    "weft.complete_stores": Program._complete,
    "weft.consume": Program._consume,
}

__all__ = ["UNKNOWN", "Descriptor", "Killed", "Program", "Waiting"]
