"""Moving rows by channels: the pieces that programs take, and copies of them between ranks.

A *channel* is one program on every rank, with one number everywhere. Channel l of a rank deals with
channel l of the others alone: it sends piece l of each shard, and signals that piece by a word of
its own. So channels need no barrier and no counter among themselves, only that all of them are
resident.

Pieces begin at multiples of LINE_BYTES, so ranks may move one shard as elements of different sizes
and still agree where a channel's piece is. `vec` is how many elements make 16 bytes where all rows
and addresses begin at 16 bytes, else 1: with it, loads and stores are 128 bits wide.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import mapping, slots

LINE_BYTES = tl.constexpr(128)


class Shards(NamedTuple):
    """`total` elements, cut into shards of `shard` of them: the last may have fewer, or none."""

    total: Any
    shard: Any


class Piece(NamedTuple):
    """What a channel moves of a shard: `size` elements from `first` on, counted from the whole's
    begin; `offset` is the same place counted from the shard's begin."""

    first: Any
    offset: Any
    size: Any


@triton.jit
def cut(x, length, vec: tl.constexpr):
    """Where this program's channel begins in `length` elements, and how many it has; x says how
    large elements are. In bytes the answer is the same for elements of all sizes."""
    line: tl.constexpr = LINE_BYTES // (x.dtype.element_ty.primitive_bitwidth // 8)
    step = tl.cdiv(tl.cdiv(length, tl.num_programs(0)), line) * line
    offset = tl.minimum(step * tl.program_id(0), length)
    size = tl.minimum(step, length - offset)
    # Multiples of vec already; said by arithmetic, since a hint would not survive inlining.
    return offset // vec * vec, size // vec * vec


@triton.jit
def own_piece(x, shards, index, vec: tl.constexpr):
    """The `Piece` of shard `index` that is this program's channel's."""
    total = tl.cast(shards.total, tl.int64)
    shard = tl.cast(shards.shard, tl.int64)
    begin, end = mapping.part_of(total, index, shard)
    offset, size = cut(x, end - begin, vec)
    return Piece(begin // vec * vec + offset, offset, size)


@triton.jit
def rounded(shards, vec: tl.constexpr):
    """The same `Shards` as int64, seen to be multiples of vec, which they are."""
    total = tl.cast(shards.total, tl.int64) // vec * vec
    return Shards(total, tl.cast(shards.shard, tl.int64) // vec * vec)


@triton.jit
def lives(shards, index, i):
    """Which of the elements i, counted from its begin, shard `index` has; shards: rounded."""
    return (i < shards.shard) & (i < shards.total - shards.shard * index)


@triton.jit
def size_of(shards, index):
    """How many elements shard `index` has; negative where it begins behind the end."""
    return tl.minimum(shards.shard, shards.total - shards.shard * index)


@triton.jit
def signal_of(signals, index):
    """The word of this program's channel among those of shard, or rank, `index`."""
    return signals + index * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def begin(world, slot):
    """The call's epoch, once the slot may be overwritten on every rank."""
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    return e


@triton.jit
def end(world, slot, e):
    """This channel is done with the call: what it was sent has come, what it read has been read."""
    slots.slot_finish(world, slot, e, tl.num_programs(0))


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
