"""Where things lie on the symmetric heap: pure bookkeeping, the same on every rank.

    | data: first fit, reused after free  ->   ...   <-  signals: never reused |

Signals grow down from the top and a freed signal word is never given out again, nor does the
signal area ever grow into bytes that once held data: a stale word must not satisfy a wait. So a
part of the heap is left to signals: else the first data that fills it would leave them no room,
even once it is freed. A heap that grows gets further segments, each laid out so; nothing lies
across two of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from weft.base.errors import NotSymmetricError, OutOfMemoryError, UsageError

# TMA wants 128 bytes, and neighbours on one 256-byte line would share its traffic.
ALIGNMENT_BYTES = 256
# Of how many parts of the heap one is for signals alone. They may take more.
SIGNALS_PART = 32
# What GPUs map memory by. Segments begin and end there, and are so far apart at least.
GRANULE_BYTES = 2 << 20


class Block(NamedTuple):
    """One allocation: `offset` from the heap's base, the bytes asked for, its name."""

    offset: int
    nbytes: int
    name: str
    is_signal: bool

    @property
    def end(self) -> int:
        return self.offset + round_up(self.nbytes)


_offset = attrgetter("offset")


class Wanted(NamedTuple):
    """An allocation that is asked for."""

    nbytes: int
    name: str
    is_signal: bool = False


def round_up(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass
class _Segment:
    """Bytes `start` to `end` of the heap, and what is free of them."""

    start: int
    end: int
    holes: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.data_top, self.signal_bottom = self.start, self.end
        left = (self.end - self.start) // SIGNALS_PART // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.data_limit = self.end - left

    @property
    def free_bytes(self) -> int:
        return self.signal_bottom - self.data_top + sum(size for _, size in self.holes)

    def copy(self) -> _Segment:
        other = copy(self)
        other.holes = [*self.holes]
        return other

    @property
    def gap_bytes(self) -> int:
        """Between data and signals, what data may take."""
        return max(0, min(self.signal_bottom, self.data_limit) - self.data_top)

    @property
    def largest_bytes(self) -> int:
        return max([self.gap_bytes, *(size for _, size in self.holes)])

    def take_signals(self, size: int) -> int | None:
        if self.signal_bottom - size < self.data_top:
            return None
        self.signal_bottom -= size
        return self.signal_bottom

    def take_data(self, size: int) -> int | None:
        for index, (offset, hole) in enumerate(self.holes):
            if hole >= size:
                self.holes[index : index + 1] = (
                    [(offset + size, hole - size)] if hole > size else []
                )
                return offset
        if size > self.gap_bytes:
            return None
        self.data_top += size
        return self.data_top - size

    def add_hole(self, offset: int, size: int) -> None:
        insort(self.holes, (offset, size))
        merged: list[tuple[int, int]] = []
        for start, length in self.holes:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.holes = merged


class HeapAllocator:
    """Deterministic: the same sequence of calls gives the same offsets on every rank.

    Units   limit_bytes: what the heap may grow to; `span_bytes` of addresses are enough for that
    """

    def __init__(self, capacity_bytes: int, owner: str = "heap", limit_bytes: int = 0) -> None:
        first = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.owner = owner
        self.limit_bytes = max(first, limit_bytes)
        self._segments = [_Segment(0, first)]
        # No allocation lies at this offset or behind.
        self.end = first
        self._blocks: list[Block] = []

    @property
    def capacity_bytes(self) -> int:
        return sum(one.end - one.start for one in self._segments)

    @property
    def span_bytes(self) -> int:
        first = self._segments[0].end
        if self.limit_bytes == first:
            return first
        # Each segment is one granule or more, and one behind the last.
        return 2 * self.limit_bytes + 2 * GRANULE_BYTES

    def next_segment(self, wanted: Iterable[Wanted]) -> tuple[int, int] | None:
        """(offset, bytes) of a segment that has room for all of these; None beyond the limit. As
        large as the heap was made, where that suffices and the limit lets it."""
        data = signals = 0
        for nbytes, _, is_signal in wanted:
            data += 0 if is_signal else round_up(nbytes)
            signals += round_up(nbytes) if is_signal else 0
        needed = max(data + signals, -(-data * SIGNALS_PART // (SIGNALS_PART - 1)))
        needed = _granules(needed + ALIGNMENT_BYTES)
        left = (self.limit_bytes - self.capacity_bytes) // GRANULE_BYTES * GRANULE_BYTES
        size = max(needed, min(left, _granules(self._segments[0].end)))
        return (_granules(self.end) + GRANULE_BYTES, size) if size <= left else None

    def grow(self, offset: int, nbytes: int) -> None:
        """The heap has a further segment."""
        self.end = offset + nbytes
        self._segments.append(_Segment(offset, self.end))

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(self._blocks)

    @property
    def free_bytes(self) -> int:
        return sum(one.free_bytes for one in self._segments)

    @property
    def largest_bytes(self) -> int:
        """The largest piece that data may take."""
        return max(one.largest_bytes for one in self._segments)

    def allocate(self, nbytes: int, name: str, *, is_signal: bool = False) -> Block:
        """Room for `nbytes`.

        Raises  OutOfMemoryError: no hole is large enough
        """
        size = round_up(nbytes)
        for segment in self._segments:
            offset = segment.take_signals(size) if is_signal else segment.take_data(size)
            if offset is not None:
                break
        else:
            raise OutOfMemoryError(
                f"{self.describe_lack(nbytes, name)}; pass a larger heap_bytes to weft.init, or "
                "set WEFT_HEAP_BYTES"
            )
        block = Block(offset, nbytes, name, is_signal)
        insort(self._blocks, block)
        return block

    def has_room(self, wanted: Iterable[Wanted], without: Iterable[int] = ()) -> bool:
        """Can all of these be allocated, one after the other, once the allocations that start at
        `without` are freed?"""
        trial = copy(self)
        trial._blocks = [*self._blocks]
        trial._segments = [one.copy() for one in self._segments]
        for offset in without:
            trial.free(offset)
        try:
            for nbytes, name, is_signal in wanted:
                trial.allocate(nbytes, name, is_signal=is_signal)
        except OutOfMemoryError:
            return False
        return True

    def describe_lack(self, nbytes: int, name: str) -> str:
        """The first sentence of an OutOfMemoryError."""
        return (
            f"{self.owner}: {name} needs {round_up(nbytes)} bytes, but of {self.capacity_bytes} "
            f"bytes only {self.free_bytes} are free, {self.largest_bytes} in one piece"
        )

    def free(self, offset: int) -> Block:
        """Give back the allocation that starts at `offset`.

        Raises  UsageError: nothing starts there (freed twice, or a view into the middle)
        """
        block = self.find(offset)
        if block is None or block.offset != offset:
            raise UsageError(
                f"{self.owner}: nothing was allocated at offset {offset}"
                + (f" (it lies inside {block.name!r}); free the whole tensor" if block else "")
            )
        del self._blocks[bisect_left(self._blocks, offset, key=_offset)]
        if not block.is_signal:
            home = next(one for one in self._segments if block.offset < one.end)
            home.add_hole(block.offset, round_up(block.nbytes))
        return block

    def find(self, offset: int) -> Block | None:
        """The allocation that holds the byte at `offset`."""
        index = bisect_right(self._blocks, offset, key=_offset) - 1
        if index < 0 or offset >= self._blocks[index].end:
            return None
        return self._blocks[index]

    def locate(self, address: int, base: int, nbytes: int, what: str) -> Block:
        """The allocation that holds `nbytes` at `address`, on the heap that starts at `base`.

        Raises  NotSymmetricError
        """
        offset = address - base
        block = self.find(offset) if 0 <= offset < self.end else None
        if block is None or offset + nbytes > block.end:
            raise NotSymmetricError(
                f"{what} at {address:#x} is not on the symmetric heap of {self.owner} "
                f"({base:#x} to {base + self.end:#x}); allocate it with world.empty(), "
                "zeros() or signals()"
            )
        return block


def _granules(nbytes: int) -> int:
    return -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES
