"""A program's plain accesses: loads and stores of pointer tiles."""

from __future__ import annotations

import numpy as np

from weft.base.errors import FarPointerError, UsageError
from weft.base.vocabulary import Order, Scope
from weft.emulator.affine import AffinePointers, box_tile
from weft.emulator.knowledge import Knowledge
from weft.emulator.memory import Allocation
from weft.emulator.shadow import carry
from weft.emulator.transitions import Access, Read, Write
from weft.emulator.windows import Window, find_window

# A scalar that is loaded this often in a row, from one line, with nothing in between, is a spin.
SPIN_LIMIT = 64


class Killed(Exception):
    """Ends one program; what was wrong has been reported."""


class PlainAccess(Knowledge):
    """Loads and stores; each finds its allocation and takes its cells through the shadow."""

    # What the last scalar load was, and how often in a row.
    _last_spin: tuple[int, int] | None = None
    _spins = 0
    _found: Allocation | None = None
    _far_ranks: frozenset[int] = frozenset()  # put to, or got from, by this program

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

    def _out_of_bounds(self, address: int, itemsize: int, what: str, loc: int) -> None:
        near = self.memory.nearest(address)
        self.findings.out_of_bounds(self, near, address, itemsize, what, loc)

    def fail(self, error: type, kind: str, message: str, loc: int, *, remedy: str) -> None:
        """Report something after which this program cannot go on, and end it."""
        self.findings.failure(self, error, kind, message, self.locations[loc], remedy)
        raise Killed

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

    def _touch_gathered(self, allocation: Allocation, cells: np.ndarray, access: Access) -> None:
        """Take the cells of these numbers through `access`."""
        shadow = allocation.shadow.take(cells)
        if carry(shadow, access):
            allocation.shadow[cells] = shadow

    # ------------------------------------------------------------------------------------------
    # Loads and stores

    def load(self, ptr, mask, other, dtype, shape, loc, volatile=False):
        if type(ptr) is AffinePointers:
            window = find_window(self._find, ptr, mask, dtype, loc)
            if window is not None:
                return self._load_window(window, other, dtype, shape, loc)
            ptr, mask = np.asarray(ptr), None if mask is None else box_tile(mask, shape)
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

    def _load_window(self, window: Window, other, dtype, shape, loc) -> np.ndarray:
        if self.checks:
            cells = window.first_cell()
            access = Read(self, window.allocation, loc, cells, shadow=window.shadow)
            carry(window.shadow, access)
        if window.inside is None:
            return window.data.copy()
        tile = np.empty(shape, dtype)
        tile[...] = 0 if other is None else other
        tile[window.inside] = window.data
        return tile

    def _gather(self, ptr: np.ndarray, dtype: np.dtype, itemsize: int, loc: int) -> np.ndarray:
        lo, hi = int(ptr.min()), int(ptr.max())
        allocation = self._find(lo, hi + itemsize, loc)
        if allocation is None:
            return self._gather_scattered(ptr, dtype, itemsize, loc)
        index = self._index(ptr, allocation, itemsize, loc)
        values = allocation.view(dtype).take(index)
        if self.checks:
            cells = self._cells(allocation, index, itemsize)
            self._touch_gathered(allocation, cells, Read(self, allocation, loc, cells))
        return values

    def _index(self, ptr: np.ndarray, allocation: Allocation, itemsize: int, loc: int):
        """Element numbers of addresses inside one allocation."""
        index = ptr - allocation.address
        if itemsize > 1:
            if (index & (itemsize - 1)).any():
                self._misaligned(allocation, itemsize, loc)
            index //= itemsize
        return index

    def _misaligned(self, allocation: Allocation, itemsize: int, loc: int) -> None:
        self.fail(
            UsageError, "misaligned",
            f"an access of {itemsize}-byte elements to {allocation.name} at an address that"
            f" {itemsize} does not divide", loc,
            remedy="GPUs fault here: check pointer casts and byte offsets",
        )  # fmt: skip

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
        offset = address - allocation.address
        if offset % itemsize:
            self._misaligned(allocation, itemsize, loc)
        return allocation, offset // itemsize

    def _touch_scalar(self, allocation, index, itemsize, access: Access) -> int:
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
                allocation, index, dtype, loc, Order.RELAXED, Scope.SYSTEM, lambda old: old,
                how="load",
            )  # fmt: skip
        if self.checks:
            cells = np.array([index * (dtype.itemsize // allocation.cell_bytes)])
            self._touch_scalar(
                allocation, index, dtype.itemsize, Read(self, allocation, loc, cells)
            )
        value = allocation.view(dtype)[index]
        spin = (loc, int(ptr))
        self._spins = self._spins + 1 if spin == self._last_spin else 0
        self._last_spin = spin
        if self._spins > SPIN_LIMIT:
            self.findings.plain_spin(self, allocation, index, loc)
            self._poll(allocation, index, dtype, loc, value)
        return value

    def store(self, ptr, value, mask, dtype, shape, loc):
        self._store(ptr, value, mask, dtype, shape, loc, self.segment(loc))

    def _store(self, ptr, value, mask, dtype, shape, loc, segment: int) -> None:
        self._last_spin = None
        itemsize = dtype.itemsize
        if type(ptr) is AffinePointers:
            window = find_window(self._find, ptr, mask, dtype, loc)
            if window is not None:
                self._store_window(window, value, shape, loc, segment)
                return
            ptr, mask = np.asarray(ptr), None if mask is None else box_tile(mask, shape)
        if shape == ():
            if mask is not None and not mask:
                return
            located = self._locate_scalar(ptr, itemsize, "writes", loc)
            if located is None:
                return
            allocation, index = located
            if self.checks:
                cells = np.array([index * (itemsize // allocation.cell_bytes)])
                self._touch_scalar(
                    allocation, index, itemsize, Write(self, allocation, loc, cells, segment)
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
            self._scatter(ptr, value, dtype, itemsize, loc, segment)

    def _store_window(self, window: Window, value, shape, loc, segment) -> None:
        allocation = window.allocation
        if self.checks:
            cells = window.first_cell()
            carry(window.shadow, Write(self, allocation, loc, cells, segment, window.shadow))
        whole = window.inside is None
        window.data[...] = value if whole else np.broadcast_to(value, shape)[window.inside]
        if allocation.sync:
            self._plain_write_to_words(allocation, *window.span())

    def _scatter(self, ptr, value, dtype, itemsize, loc, segment) -> None:
        lo, hi = int(ptr.min()), int(ptr.max())
        allocation = self._find(lo, hi + itemsize, loc)
        if allocation is None:
            for lanes, _ in self._by_allocation(ptr, itemsize, "writes", loc):
                self._scatter(ptr[lanes], value[lanes], dtype, itemsize, loc, segment)
            return
        index = self._index(ptr, allocation, itemsize, loc)
        if self.checks:
            cells = self._cells(allocation, index, itemsize)
            self._touch_gathered(allocation, cells, Write(self, allocation, loc, cells, segment))
        allocation.view(dtype)[index] = value
        if allocation.sync:
            self._plain_write_to_words(allocation, lo - allocation.address, hi - lo + itemsize)

    def _plain_write_to_words(self, allocation: Allocation, start: int, nbytes: int) -> None:
        """A plain store over signal words publishes nothing, but waiters do see it."""
        for cell in list(allocation.sync):
            offset = cell * allocation.cell_bytes
            if start <= offset < start + nbytes:
                allocation.sync[cell].published.clear()
                self.waiters.word_changed(allocation, cell)
