"""The memory of an emulated machine: allocations by address, their data and their shadow.

Memory is that of ordinary CPU tensors, at its real addresses, so that unchanged kernels, pointer
tables and torch operations all see the same bytes. What is added is a shadow per allocation: one
history number per *cell* (an element of the allocation's dtype), and a `SyncWord` per cell that
atomics use.
"""

from __future__ import annotations

import bisect
import ctypes
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.base.elements import Axes, Element
from weft.base.vocabulary import Order, Scope
from weft.emulator.clocks import Clock, covers
from weft.emulator.shadow import Shadow
from weft.emulator.word_values import WordValues

# A signal word of copy engines, streams and packets.
WORD = np.dtype(np.int64)

ORDERS = {order.value: order for order in Order}
SCOPES = {scope.value: scope for scope in Scope}


def behind(seen, expected, kind: np.dtype) -> bool:
    """Is `seen` before `expected`, modularly: signed(seen - expected) < 0?"""
    return int(wrap_add(seen, -int(expected), kind)) < 0


def wrap_add(old, value, dtype: np.dtype):
    if dtype.kind not in "iu":
        return dtype.type(old + value)
    bits = dtype.itemsize * 8
    total = (int(old) + int(value)) & ((1 << bits) - 1)
    if dtype.kind == "i" and total >> (bits - 1):
        total -= 1 << bits
    return dtype.type(total)


def _unsigned(function):
    def apply(old, value):
        kind = np.dtype(f"u{old.itemsize}")
        return function(old.view(kind), value.view(kind)).view(old.dtype)

    return apply


# What atomics make of words and their operands, by scalars and by tiles.
RMW = {
    "add": np.add,
    "fadd": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "max": np.maximum,
    "min": np.minimum,
    "umax": _unsigned(np.maximum),
    "umin": _unsigned(np.minimum),
    "exch": lambda old, value: value,
}


# A strided span: (address, shape, strides in bytes, numpy dtype).
Span = tuple[int, tuple[int, ...], tuple[int, ...], np.dtype]


@dataclass
class SyncWord:
    """What releases have published at one word, by who published it and how widely."""

    published: dict[tuple[int, Scope], Clock] = field(default_factory=dict)
    packet: Clock | None = None  # which packets the sender of the one in this word had read
    values: WordValues = field(default_factory=WordValues)

    def release(self, rank: int, scope: Scope, clock: Clock) -> None:
        earlier = self.published.get((rank, scope))
        if earlier is not None:
            # Not in place: the words of one tile share a clock.
            clock, later = earlier.copy(), clock
            clock.join(later)
        self.published[(rank, scope)] = clock

    def acquire(self, rank: int, scope: Scope) -> list[Clock]:
        """What an acquire of `scope` on `rank` may learn: both scopes must cover the two."""
        return [
            clock
            for (publisher, published_scope), clock in self.published.items()
            if covers(published_scope, scope, publisher == rank)
        ]


def narrower(first: Scope, second: Scope) -> Scope:
    """The scope that both include."""
    order = list(Scope)
    return min(first, second, key=order.index)


def index_text(index: int | tuple[int, ...]) -> str:
    return ", ".join(map(str, index)) if isinstance(index, tuple) else str(index)


class Allocation:
    """A range of addresses on one rank.

    `heap_offset` is set for symmetric memory: its offset on the symmetric heap. `cell_bytes` is
    the shadow's granularity; it shrinks when a smaller element is accessed. `axes` gives what an
    index stands for at present.
    """

    __slots__ = (
        "__weakref__", "address", "axes", "buffer", "cell_bytes", "dtype", "end", "heap",
        "heap_offset", "initialised", "name", "nbytes", "number", "owner", "rank",
        "shadow", "shape", "sync", "views",
    )  # fmt: skip

    def __init__(
        self, address: int, nbytes: int, cell_bytes: int, rank: int, name: str, *,
        heap_offset: int | None, heap: Any, initialised: bool, shape: tuple[int, ...],
        axes: Callable[[], Axes] | None = None,
    ) -> None:  # fmt: skip
        self.address = address
        self.axes = axes
        self.nbytes = nbytes
        self.end = address + nbytes
        self.cell_bytes = cell_bytes
        self.rank = rank
        self.name = name
        self.shape = shape
        self.heap_offset = heap_offset
        self.heap = heap
        self.buffer = (ctypes.c_char * nbytes).from_address(address) if nbytes else b""
        self.views: dict[Any, np.ndarray] = {}
        start = Shadow.INITIAL if initialised else Shadow.UNWRITTEN
        self.shadow = np.full(-(-nbytes // cell_bytes), start, np.int32)
        self.sync: dict[int, SyncWord] = {}
        self.owner: Any = None
        self.number = 0  # of its rank's allocations, in the order in which they came to be known

    def view(self, dtype: np.dtype) -> np.ndarray:
        """All of it as a flat array of `dtype`."""
        view = self.views.get(dtype)
        if view is None:
            count = self.nbytes // dtype.itemsize
            view = np.frombuffer(self.buffer, dtype=dtype, count=count)
            self.views[dtype] = view
        return view

    def refine(self, itemsize: int) -> None:
        """Give the shadow cells of `itemsize` bytes; histories are kept."""
        factor = self.cell_bytes // itemsize
        self.shadow = np.repeat(self.shadow, factor)
        self.sync = {cell * factor: word for cell, word in self.sync.items()}
        self.cell_bytes = itemsize

    def sync_word(self, cell: int) -> SyncWord:
        word = self.sync.get(cell)
        if word is None:
            word = self.sync[cell] = SyncWord()
        return word

    def index(self, address: int, itemsize: int) -> int | tuple[int, ...]:
        """The element at `address`, in the tensor's own shape where that is known."""
        flat = (address - self.address) // itemsize
        if len(self.shape) > 1 and 0 <= address - self.address < self.nbytes:
            try:
                return tuple(int(i) for i in np.unravel_index(flat, self.shape))
            except ValueError:
                return int(flat)
        return Element(flat, self.axes()) if self.axes is not None else int(flat)

    def word_name(self, address: int, itemsize: int) -> str:
        """The element at `address` as one writes it: `rows_ready[3]`."""
        return f"{self.name}[{index_text(self.index(address, itemsize))}]"

    def __repr__(self) -> str:
        return f"{self.name}@rank{self.rank}[{self.nbytes} bytes]"


class _Owner(weakref.ref):
    """The tensor's storage whose memory an allocation is."""

    __slots__ = ("allocation",)

    allocation: Allocation


class Memory:
    """All allocations of a machine, found by address.

    An owner may go at any moment, in any thread: Python collects garbage wherever memory is
    asked for. So the callback of an owner that goes only leaves a note. The next call here drops
    what the notes name, before anybody else can have got the same addresses.
    """

    def __init__(self) -> None:
        self._gone: list[_Owner] = []
        self.kept: list[Any] = []  # owners that stay for as long as this does
        self.packet_segments: set[int] = set()  # those that wrote packets
        # By rank and stream: which packets the stream's works have read.
        self.packet_reads: dict[int, dict[int, Any]] = defaultdict(dict)
        self._numbers: Counter[int] = Counter()
        # By heap, offset and rank.
        self._symmetric: dict[tuple[Any, int, int], weakref.ref[Allocation]] = {}
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []

    def register(
        self, address: int, nbytes: int, itemsize: int, rank: int, name: str, *,
        heap_offset: int | None = None, heap: Any = None, initialised: bool = True,
        shape: tuple[int, ...] = (), owner: Any = None, axes: Callable[[], Axes] | None = None,
    ) -> Allocation:  # fmt: skip
        """Track `nbytes` at `address` as `name` on `rank`.

        The same range registered again gives the same allocation. `owner` is kept only weakly:
        when it goes, so does the allocation. A range that overlaps an old one replaces it.
        """
        found = self.find(address)
        if found is not None and found.address == address and found.nbytes == nbytes:
            return found
        if nbytes:
            self._drop_overlapping(address, address + nbytes)
        allocation = Allocation(
            address, nbytes, itemsize, rank, name, heap_offset=heap_offset, heap=heap,
            initialised=initialised, shape=shape, axes=axes,
        )  # fmt: skip
        if heap_offset is not None:
            self._symmetric[heap, heap_offset, rank] = weakref.ref(allocation)
        self._numbers[rank] += 1
        allocation.number = self._numbers[rank]
        place = bisect.bisect_left(self._starts, address)
        self._starts.insert(place, address)
        self._allocations.insert(place, allocation)
        if owner is not None:
            allocation.owner = _Owner(owner, self._gone.append)
            allocation.owner.allocation = allocation
        return allocation

    def find(self, address: int) -> Allocation | None:
        """The allocation that holds `address`, if any."""
        if self._gone:
            self._drop_gone()
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        allocation = self._allocations[place]
        return allocation if address < allocation.end else None

    def symmetric(self, allocation: Allocation, rank: int) -> Allocation | None:
        """What `rank` has where `allocation` lies on its own symmetric heap."""
        if allocation.heap_offset is None or allocation.rank == rank:
            return None if allocation.heap_offset is None else allocation
        found = self._symmetric.get((allocation.heap, allocation.heap_offset, rank))
        return found() if found is not None else None

    def nearest(self, address: int) -> Allocation | None:
        """The allocation that ends or begins closest to `address`: what a report names."""
        self._drop_gone()
        place = bisect.bisect_right(self._starts, address)
        near = self._allocations[max(place - 1, 0) : place + 1]
        return min(
            near,
            key=lambda a: min(abs(address - a.address), abs(address - a.end)),
            default=None,
        )

    def _drop_gone(self) -> None:
        while self._gone:
            self.forget(self._gone.pop().allocation)

    def forget(self, allocation: Allocation) -> None:
        allocation.owner = None  # and with it the callback
        place = bisect.bisect_left(self._starts, allocation.address)
        while place < len(self._allocations) and self._starts[place] == allocation.address:
            if self._allocations[place] is allocation:
                del self._starts[place], self._allocations[place]
                return
            place += 1

    def _drop_overlapping(self, start: int, end: int) -> None:
        place = max(bisect.bisect_right(self._starts, start) - 1, 0)
        stale = []
        for allocation in self._allocations[place:]:
            if allocation.address >= end:
                break
            if allocation.end > start:
                stale.append(allocation)
        for allocation in stale:
            self.forget(allocation)

    def __iter__(self):
        self._drop_gone()
        return iter(list(self._allocations))
