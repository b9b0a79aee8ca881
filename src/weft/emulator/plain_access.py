"""A program's plain accesses: loads and stores of tiles, by pointers and through descriptors.

Stores through descriptors are asynchronous, and an agent of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.base.errors import FarPointerError
from weft.base.place import Place
from weft.base.vocabulary import Order, Scope
from weft.emulator.accesses import Accessor, Read, Write
from weft.emulator.affine import AffinePointers, Box, Window, box_tile, find_window
from weft.emulator.clocks import Clock, Identity
from weft.emulator.device import Device
from weft.emulator.memory import Allocation
from weft.emulator.shadow import carry
from weft.emulator.works import KernelWork

# A scalar that is loaded this often in a row, from one line, with nothing in between, is a spin.
SPIN_LIMIT = 64


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor: base address, sizes and strides in elements, the block it moves."""

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    dtype: np.dtype
    padding: str = "zero"

    @property
    def outside(self) -> float:
        return np.nan if self.padding == "nan" else 0


class PlainAccess(Accessor):
    """What a program knows, and its loads and stores."""

    # What the last scalar load was, and how often in a row.
    _last_spin: tuple[int, int] | None = None
    _spins = 0
    _found: Allocation | None = None
    _far_ranks: frozenset[int] = frozenset()  # put to, or got from, by this program

    def __init__(self, device: Device, work: KernelWork, pid: tuple[int, int, int]) -> None:
        agents, name = device.checker.agents, work.kernel.name
        identity = Identity(work.rank, name, pid, agents.call(work.rank, name, work.number))
        agent = agents.add(identity, work.stream.number, work.position)
        # The clock is shared until this program learns something.
        super().__init__(device.checker, device.waiters, agent, 0, work.clock, work)
        self.device = device
        self.scheduler = device.scheduler
        self.locations = work.kernel.locations
        self.done = 0  # grows with each release before which something was done
        self._did_something = False
        self.segments: dict[Any, int] = {}
        self.async_agent = -1
        self.async_clk = 0
        self.async_done = -1

    # ------------------------------------------------------------------------------------------
    # Its clocks

    def new_agent(self) -> int:
        """An agent beside the program, for what has another order than its own."""
        identity = self.agents.identity[self.agent]
        return self.agents.add(identity, self.work.stream.number, self.work.position)

    def place_of(self, loc: int) -> Place:
        return self.locations[loc]

    def owns(self, segment: int) -> bool:
        agent = self.agents.segment_agent[segment]
        return agent == self.agent or agent == self.async_agent

    def segment(self, loc: int, scope: Scope | None = None) -> int:
        key = loc if scope is None else (loc, scope)
        segment = self.segments.get(key)
        if segment is None:
            segment = self._new_segment(key, self.agent, self.clk, loc, scope)
            self._did_something |= scope is None
        return segment

    def async_segment(self, loc: int, scope: Scope | None = None) -> int:
        """The same for an asynchronous (descriptor) store, or reduction, which is atomic."""
        key = ("async", loc, self.async_clk, scope)
        segment = self.segments.get(key)
        if segment is None:
            self._did_something = True
            if self.async_agent < 0:
                self.async_agent = self.new_agent()
            segment = self._new_segment(key, self.async_agent, self.async_clk, loc, scope)
            self.agents.issuer[segment] = self.agent, self.clk
        return segment

    def _new_segment(self, key: Any, agent: int, clk: int, loc: int, scope: Scope | None) -> int:
        segment = self.agents.segment(agent, clk, self.locations[loc], scope)
        self.segments[key] = segment
        return segment

    def complete_stores(self) -> None:
        if self.async_agent >= 0:
            self.async_done = self.async_clk
            self.async_clk += 1

    def learn(self, clocks: list[Clock]) -> None:
        if not clocks:
            return
        self._did_something = True
        if self.clock is self.work.clock:
            self.clock = self.clock.copy()
        super().learn(clocks)

    def publish(self) -> Clock:
        clock = super().publish()
        if self.async_done >= 0:
            clock.learn(self.async_agent, self.async_done)
        self.done += self._did_something
        self._did_something = False
        self.segments.clear()
        return clock

    # ------------------------------------------------------------------------------------------
    # Finding memory

    def find(self, lo: int, hi: int, loc: int) -> Allocation | None:
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
        device = self.device
        if device.num_nodes == 1 or found.rank in self._far_ranks:
            return
        if device.node_of(found.rank) != device.node_of(self.rank):
            self.fail(
                FarPointerError, "far pointer",
                f"rank {found.rank} is on another node: rank {self.rank} cannot dereference"
                f" {found.name} there", loc,
                remedy="use wl.put, wl.get or wl.put_signal, or ask wl.is_near first",
            )  # fmt: skip

    def parts(self, ptr: np.ndarray, dtype: np.dtype, what: str, loc: int):
        """(lanes, allocation, their element numbers in it) for each allocation behind a tile."""
        itemsize = dtype.itemsize
        lo, hi = int(ptr.min()), int(ptr.max())
        allocation = self.find(lo, hi + itemsize, loc)
        if allocation is not None:
            yield ..., allocation, self._index(ptr, allocation, itemsize, loc)
            return
        left = np.ones(ptr.shape, bool)
        while left.any():
            address = int(ptr[left][0])
            allocation = self.find(address, address + itemsize, loc)
            if allocation is None:
                self.findings.out_of_bounds(self, address, itemsize, what, loc)
                left &= np.vectorize(lambda a: self._holds(int(a), itemsize))(ptr)
                continue
            lanes = left & (ptr >= allocation.address) & (ptr + itemsize <= allocation.end)
            left &= ~lanes
            yield lanes, allocation, self._index(ptr[lanes], allocation, itemsize, loc)

    def _holds(self, address: int, itemsize: int) -> bool:
        found = self.memory.find(address)
        return found is not None and address + itemsize <= found.end

    def _index(self, ptr: np.ndarray, allocation: Allocation, itemsize: int, loc: int):
        """Element numbers of addresses inside one allocation."""
        if itemsize < allocation.cell_bytes:
            allocation.refine(itemsize)
        index = ptr - allocation.address
        if itemsize > 1:
            if (index & (itemsize - 1)).any():
                self.misaligned(allocation, itemsize, loc)
            index //= itemsize
        return index

    # ------------------------------------------------------------------------------------------
    # Shadow memory

    def touch(self, kind: Any, allocation, index, itemsize, loc, segment=None, **how) -> None:
        """Take elements' cells through an access of this kind."""
        if allocation.rank != self.rank:
            self.moves(kind, allocation, index.size * itemsize)
        # Element numbers as cell numbers of the shadow.
        cells, factor = index, itemsize // allocation.cell_bytes
        if factor > 1:
            cells = index[..., None] * factor + np.arange(factor)
        access = kind(self, allocation, loc, cells, segment, **how)
        shadow = allocation.shadow.take(cells)
        if carry(shadow, access):
            allocation.shadow[cells] = shadow

    def touch_window(self, kind: Any, window: Window, loc: int, segment=None) -> None:
        shadow = window.shadow
        if window.allocation.rank != self.rank:
            self.moves(kind, window.allocation, window.data.nbytes)
        carry(shadow, kind(self, window.allocation, loc, window.first_cell(), segment, shadow))

    # ------------------------------------------------------------------------------------------
    # Loads

    def load(self, ptr, mask, other, dtype, shape, loc, volatile=False, segment=None):
        if type(ptr) is AffinePointers:
            window = find_window(self.find, ptr, mask, dtype, loc)
            if window is not None:
                return self._load_window(window, other, dtype, shape, loc, segment)
            ptr, mask = np.asarray(ptr), None if mask is None else box_tile(mask, shape)
        if shape == ():
            return self._load_scalar(ptr, mask, other, dtype, loc, volatile)
        if mask is not None and not np.all(mask):
            mask = np.broadcast_to(mask, shape)
            filled = np.empty(shape, dtype)
            filled[...] = 0 if other is None else other
            chosen = np.broadcast_to(ptr, shape)[mask]
            if chosen.size:
                filled[mask] = self._gather(chosen, dtype, loc, segment)
            return filled
        if not isinstance(ptr, np.ndarray):
            ptr = np.full((1,) * len(shape), ptr, np.int64)
        values = self._gather(ptr, dtype, loc, segment)
        return values if values.shape == shape else np.broadcast_to(values, shape)

    def _load_window(self, window: Window, other, dtype, shape, loc, segment) -> np.ndarray:
        self.touch_window(Read, window, loc, segment)
        if window.inside is None:
            return window.data.copy()
        tile = np.empty(shape, dtype)
        tile[...] = 0 if other is None else other
        tile[window.inside] = window.data
        return tile

    def _gather(self, ptr: np.ndarray, dtype: np.dtype, loc: int, segment) -> np.ndarray:
        values = np.zeros(ptr.shape, dtype)
        for lanes, allocation, index in self.parts(ptr, dtype, "reads", loc):
            values[lanes] = allocation.view(dtype).take(index)
            self.touch(Read, allocation, index, dtype.itemsize, loc, segment)
        return values

    def _load_scalar(self, ptr, mask, other, dtype, loc, volatile):
        if mask is not None and not mask:
            return dtype.type(0 if other is None else other)
        located = self.locate(ptr, dtype.itemsize, "reads", loc)
        if located is None:
            return dtype.type(0)
        allocation, index = located
        if volatile:
            return self.atomic(
                allocation, index, dtype, loc, Order.RELAXED, Scope.SYSTEM, lambda old: old,
                how="load",
            )  # fmt: skip
        self.touch_element(Read, allocation, index, dtype.itemsize, loc)
        value = allocation.view(dtype)[index]
        spin = (loc, int(ptr))
        self._spins = self._spins + 1 if spin == self._last_spin else 0
        self._last_spin = spin
        if self._spins > SPIN_LIMIT:
            self.findings.fault("plain spin", self, loc, allocation, index)
            self.poll(allocation, index, dtype, loc, value)
        return value

    # ------------------------------------------------------------------------------------------
    # Stores

    def store(self, ptr, value, mask, dtype, shape, loc, segment: int | None = None) -> None:
        self._last_spin = None
        segment = self.segment(loc) if segment is None else segment
        if type(ptr) is AffinePointers:
            window = find_window(self.find, ptr, mask, dtype, loc)
            if window is not None:
                self._store_window(window, value, shape, loc, segment)
                return
            ptr, mask = np.asarray(ptr), None if mask is None else box_tile(mask, shape)
        if shape == ():
            if mask is None or mask:
                self._store_scalar(ptr, value, dtype, loc, segment)
            return
        ptr = np.broadcast_to(ptr, shape)
        value = np.broadcast_to(value, shape)
        if mask is not None and not np.all(mask):
            mask = np.broadcast_to(mask, shape)
            ptr, value = ptr[mask], value[mask]
        if not ptr.size:
            return
        for lanes, allocation, index in self.parts(ptr, dtype, "writes", loc):
            self.touch(Write, allocation, index, dtype.itemsize, loc, segment)
            allocation.view(dtype)[index] = value[lanes]
            if allocation.sync:
                self._wrote_over_words(allocation, int(index.min()), int(index.max()), dtype)

    def _store_scalar(self, ptr, value, dtype, loc, segment) -> None:
        located = self.locate(ptr, dtype.itemsize, "writes", loc)
        if located is None:
            return
        allocation, index = located
        self.touch_element(Write, allocation, index, dtype.itemsize, loc, segment)
        allocation.view(dtype)[index] = value
        if allocation.sync:
            self._wrote_over_words(allocation, index, index, dtype)

    def _store_window(self, window: Window, value, shape, loc, segment) -> None:
        self.touch_window(Write, window, loc, segment)
        whole = window.inside is None
        window.data[...] = value if whole else np.broadcast_to(value, shape)[window.inside]
        if window.allocation.sync:
            start, nbytes = window.span()
            dtype = window.data.dtype
            last = (start + nbytes) // dtype.itemsize - 1
            self._wrote_over_words(window.allocation, start // dtype.itemsize, last, dtype)

    def _wrote_over_words(self, allocation: Allocation, first: int, last: int, dtype) -> None:
        """A plain store over signal words publishes nothing, but waiters do see it."""
        for cell in list(allocation.sync):
            if first <= cell * allocation.cell_bytes // dtype.itemsize <= last:
                allocation.sync[cell].published.clear()
                self.waiters.word_changed(allocation, cell)

    # ------------------------------------------------------------------------------------------
    # Descriptors: blocks are windows, so that no addresses are computed per element

    def make_descriptor(self, base, sizes, strides, block_shape, dtype, padding, loc):
        return Descriptor(
            int(base), tuple(map(int, sizes)), tuple(map(int, strides)), tuple(block_shape),
            dtype, padding or "zero",
        )  # fmt: skip

    def block(self, desc: Descriptor, indices) -> tuple[AffinePointers, Box]:
        """The block's pointers, and the part of it that lies inside the tensor."""
        start, steps, box = desc.base, [], []
        for index, size, stride, extent in zip(
            indices, desc.sizes, desc.strides, desc.block, strict=True
        ):
            first = int(index)
            step = stride * desc.dtype.itemsize
            start += first * step
            steps.append(step)
            box.append((max(-first, 0), min(max(size - first, 0), extent)))
        return AffinePointers(start, tuple(steps), desc.block), tuple(box)

    def descriptor_load(self, desc: Descriptor, indices, shape, loc):
        pointers, box = self.block(desc, indices)
        return self.load(pointers, box, desc.outside, desc.dtype, desc.block, loc).reshape(shape)

    def descriptor_store(self, desc: Descriptor, indices, value, loc):
        pointers, box = self.block(desc, indices)
        value = np.asarray(value).reshape(desc.block)
        self.store(pointers, value, box, desc.dtype, desc.block, loc, self.async_segment(loc))
