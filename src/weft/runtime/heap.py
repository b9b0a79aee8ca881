"""Where things lie on the symmetric heap: pure bookkeeping, the same on every rank.

    | data: first fit, reused after free  ->   ...   <-  signals: never reused |

Signals grow down from the top and a freed signal word is never given out again, nor does the
signal area ever grow into bytes that once held data: a stale word must not satisfy a wait. So a
part of the heap is left to signals: else the first data that fills it would leave them no room,
even once it is freed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from weft.base.errors import NotSymmetricError, OutOfMemoryError, UsageError

# TMA wants 128 bytes, and neighbours on one 256-byte line would share its traffic.
ALIGNMENT_BYTES = 256
# Of how many parts of the heap one is for signals alone. They may take more.
SIGNALS_PART = 32


@dataclass(frozen=True, order=True)
class Block:
    """One allocation: `offset` from the heap's base, the bytes asked for, its name."""

    offset: int
    nbytes: int
    name: str
    is_signal: bool

    @property
    def end(self) -> int:
        return self.offset + round_up(self.nbytes)


class Wanted(NamedTuple):
    """An allocation that is asked for."""

    nbytes: int
    name: str
    is_signal: bool = False


def round_up(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class HeapAllocator:
    """Deterministic: the same sequence of calls gives the same offsets on every rank."""

    def __init__(self, capacity_bytes: int, owner: str = "heap") -> None:
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.owner = owner
        self._blocks: list[Block] = []
        self._holes: list[tuple[int, int]] = []
        self._data_top = 0
        self._signal_bottom = self.capacity_bytes
        left = self.capacity_bytes // SIGNALS_PART // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._data_limit = self.capacity_bytes - left

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(self._blocks)

    @property
    def free_bytes(self) -> int:
        return self._signal_bottom - self._data_top + sum(size for _, size in self._holes)

    def allocate(self, nbytes: int, name: str, *, is_signal: bool = False) -> Block:
        """Room for `nbytes`.

        Raises  OutOfMemoryError: no hole is large enough
        """
        size = round_up(nbytes)
        offset = self._take_signals(size) if is_signal else self._take_data(size)
        if offset is None:
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
        trial._blocks, trial._holes = [*self._blocks], [*self._holes]
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
            f"bytes only {self.free_bytes} are free, {self._largest_bytes()} in one piece"
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
        self._blocks.remove(block)
        if not block.is_signal:
            self._add_hole(block.offset, round_up(block.nbytes))
        return block

    def find(self, offset: int) -> Block | None:
        """The allocation that holds the byte at `offset`."""
        index = bisect_right(self._blocks, offset, key=lambda block: block.offset) - 1
        if index < 0 or offset >= self._blocks[index].end:
            return None
        return self._blocks[index]

    def locate(self, address: int, base: int, nbytes: int, what: str) -> Block:
        """The allocation that holds `nbytes` at `address`, on the heap that starts at `base`.

        Raises  NotSymmetricError
        """
        offset = address - base
        block = self.find(offset) if 0 <= offset < self.capacity_bytes else None
        if block is None or offset + nbytes > block.end:
            raise NotSymmetricError(
                f"{what} at {address:#x} is not on the symmetric heap of {self.owner} "
                f"({base:#x} to {base + self.capacity_bytes:#x}); allocate it with world.empty(), "
                "zeros() or signals()"
            )
        return block

    def _take_signals(self, size: int) -> int | None:
        if self._signal_bottom - size < self._data_top:
            return None
        self._signal_bottom -= size
        return self._signal_bottom

    def _take_data(self, size: int) -> int | None:
        for index, (offset, hole) in enumerate(self._holes):
            if hole >= size:
                self._holes[index : index + 1] = (
                    [(offset + size, hole - size)] if hole > size else []
                )
                return offset
        if size > self._gap_bytes:
            return None
        self._data_top += size
        return self._data_top - size

    def _add_hole(self, offset: int, size: int) -> None:
        insort(self._holes, (offset, size))
        merged: list[tuple[int, int]] = []
        for start, length in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._holes = merged

    def _largest_bytes(self) -> int:
        return max([self._gap_bytes, *(size for _, size in self._holes)])

    @property
    def _gap_bytes(self) -> int:
        """Between data and signals, what data may take."""
        return max(0, min(self._signal_bottom, self._data_limit) - self._data_top)
