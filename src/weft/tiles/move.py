"""Moving rows by lanes: the pieces that programs take, and copies of them between ranks.

A *lane* is one program on every rank, with one number everywhere. Lane l of a rank deals with lane
l of the others alone: it sends piece l of each shard, and signals that piece by a word of its own.
So lanes need no barrier and no counter among themselves, only that all of them are resident.

Pieces begin at multiples of LINE_BYTES, so ranks may move one shard as elements of different sizes
and still agree where a lane's piece is. `vec` is how many elements make 16 bytes where all rows
and addresses begin at 16 bytes, else 1: with it, loads and stores are 128 bits wide.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl

LINE_BYTES = tl.constexpr(128)


class Shards(NamedTuple):
    """`total` elements, cut into shards of `shard` of them: the last may have fewer, or none."""

    total: Any
    shard: Any


class Piece(NamedTuple):
    """What a lane moves of a shard: `size` elements from `first` on, counted from the whole's
    begin; `offset` is the same place counted from the shard's begin."""

    first: Any
    offset: Any
    size: Any


@triton.jit
def piece_of(shards, index, lane, num_lanes, itemsize: tl.constexpr, vec: tl.constexpr):
    """The `Piece` of shard `index` that is `lane`'s; the same for all `itemsize`s, in bytes."""
    line: tl.constexpr = LINE_BYTES // itemsize
    total = tl.cast(shards.total, tl.int64)
    shard = tl.cast(shards.shard, tl.int64)
    begin = tl.minimum(shard * index, total)
    length = tl.minimum(shard, total - begin)
    step = tl.cdiv(tl.cdiv(length, num_lanes), line) * line
    offset = tl.minimum(step * lane, length)
    size = tl.minimum(step, length - offset)
    # Multiples of vec already; said by arithmetic, since a hint would not survive inlining.
    begin, offset, size = begin // vec * vec, offset // vec * vec, size // vec * vec
    return Piece(begin + offset, offset, size)


@triton.jit
def copy(dst, src, size, block: tl.constexpr):
    """dst[0 .. size - 1]  <-  src, both here."""
    for start in range(0, size, block):
        i = start + tl.arange(0, block)
        tl.store(dst + i, tl.load(src + i, mask=i < size), mask=i < size)


@triton.jit
def send(world, dst, src, size, to, block: tl.constexpr):
    """dst@to[0 .. size - 1]  <-  src, to a rank that may be far. Sync  none: notify after it"""
    for start in range(0, size, block):
        i = start + tl.arange(0, block)
        wl.put(world, dst + i, src + i, to=to, mask=i < size)


@triton.jit
def fetch(world, dst, src, size, source, block: tl.constexpr):
    """dst[0 .. size - 1]  <-  src@source. Sync  none: wait before it"""
    for start in range(0, size, block):
        i = start + tl.arange(0, block)
        wl.get(world, dst + i, src + i, source=source, mask=i < size)
