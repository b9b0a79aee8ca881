"""Rows to ranks by splits that are read on the device: how many rows move the host need not know.

Channel l (weft.tiles.move) moves piece l of what one rank sends another. A rank's entry of `ranges`
tells another which of its rows are meant for that one, or, negative, what is wrong with its splits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import move


class Sizes(NamedTuple):
    """x has `rows`, out `capacity`; one source's part of a pushed slot has `stride`. A row is `row`
    elements."""

    rows: Any
    capacity: Any
    stride: Any
    row: Any


class Range(NamedTuple):
    """`count` rows from `first` on."""

    first: Any
    count: Any


# What is wrong with splits, as one integer: a number, whose splits, which of them, and the kind.
NEGATIVE, TOO_MANY = tl.constexpr(1), tl.constexpr(2)
WHICH_BITS, SOURCE_BITS, NUMBER_BITS = tl.constexpr(2), tl.constexpr(16), tl.constexpr(30)
MOST = tl.constexpr(1 << 32)


@triton.jit
def _wrong(world, splits, sizes):
    """What is wrong with own splits; 0 where nothing is."""
    word, total = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    source = wl.rank(world).to(tl.int64) << SOURCE_BITS
    for to in range(world.num_ranks):
        count = tl.load(splits + to)
        number = tl.minimum(-tl.maximum(count, 1 - MOST), MOST - 1)
        said = (number << NUMBER_BITS) | source | (to << WHICH_BITS) | NEGATIVE
        word = tl.where((count < 0) & (word == 0), said, word)
        total = tl.minimum(total + tl.minimum(tl.maximum(count, 0), MOST - 1), MOST - 1)
    too_many = (total << NUMBER_BITS) | source | TOO_MANY
    return tl.where((word == 0) & (total > sizes.rows), too_many, word)


@triton.jit
def _range_to(splits, wrong, to):
    """Which rows of x go to rank `to`; none, and what is `wrong` in place of their number, where
    something is."""
    first = tl.cast(0, tl.int64)
    if wrong == 0:
        for before in range(to):
            first += tl.load(splits + before)
    return Range(first, tl.where(wrong == 0, tl.load(splits + to), -wrong))


@triton.jit
def _announce(world, ranges, rows_ready, e, rows, to, is_pull: tl.constexpr):
    """Rank `to` learns which rows are meant for it, or what is wrong with splits, and that this
    channel's piece may be read."""
    entry = move.signal_of(ranges, 2 * wl.rank(world))
    if is_pull:
        wl.put(world, entry, rows.first, to=to)
    wl.put(world, entry + tl.num_programs(0), rows.count, to=to)
    word = move.signal_of(rows_ready, wl.rank(world))
    wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def _range_from(world, ranges, rows_ready, e, source, is_pull: tl.constexpr):
    """Which rows rank `source` has for this rank, once this channel's piece may be read.

    Pushed rows lie where the source puts them: their `first` is 0.
    """
    wl.wait(move.signal_of(rows_ready, source), e, world=world)  # pairs with _announce
    entry = move.signal_of(ranges, 2 * source)
    first = tl.cast(0, tl.int64)
    if is_pull:
        first = tl.load(entry)
    return Range(first, tl.load(entry + tl.num_programs(0)))


@triton.jit
def _take(out, num_received, source, rows, come, count, sizes, block: tl.constexpr,
          vec: tl.constexpr):  # fmt: skip
    """`count` rows of a source, behind the `come` rows of those before it -> out."""
    row = tl.cast(sizes.row, tl.int64)
    offset, size = move.cut(out, count * row, vec)
    at = (come * row) // vec * vec + offset
    room = tl.maximum(tl.cast(sizes.capacity, tl.int64) * row - at, 0) // vec * vec
    move.copy(out + at, rows + offset, tl.minimum(size, room), block)
    if tl.program_id(0) == 0:
        tl.store(num_received + source, count)


@triton.jit
def _fill(out, come, sizes, block: tl.constexpr, vec: tl.constexpr):
    """Zeros behind the rows that have come."""
    row = tl.cast(sizes.row, tl.int64)
    come = (come * row) // vec * vec
    rest = tl.maximum(tl.cast(sizes.capacity, tl.int64) * row - come, 0)
    offset, size = move.cut(out, rest, vec)
    for start in range(0, size, block):
        i = start + tl.arange(0, block)
        zeros = tl.zeros((block,), out.dtype.element_ty)
        tl.store(out + come + offset + i, zeros, mask=i < size)


@triton.jit
def exchange_by_splits(x, out, received, splits, num_received, errors, ranges, rows_ready, slot,
                       sizes, world, block: tl.constexpr, vec: tl.constexpr,
                       is_pull: tl.constexpr):  # fmt: skip
    """Rows -> the slot of their rank; or (`is_pull`) the own slot, from which that rank reads them.
    rows_ready: int64[num_ranks * channels], ranges: twice as many, by the source."""
    rank, e = wl.rank(world), move.begin(world, slot)
    row, wrong = tl.cast(sizes.row, tl.int64), _wrong(world, splits, sizes)
    stride = (row * sizes.stride) // vec * vec
    for hop in range(1, world.num_ranks):
        to = (rank + hop) % world.num_ranks
        rows = _range_to(splits, wrong, to)
        offset, size = move.cut(x, tl.maximum(rows.count, 0) * row, vec)
        first = (rows.first * row) // vec * vec + offset
        if is_pull:
            move.send(world, received + first, x + first, size, rank, block)
        else:
            move.send(world, received + stride * rank + offset, x + first, size, to, block)
        _announce(world, ranges, rows_ready, e, rows, to, is_pull)
    come, said = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    for source in range(world.num_ranks):
        if source == rank:
            rows = _range_to(splits, wrong, rank)
            begin = x + (rows.first * row) // vec * vec
        else:
            rows = _range_from(world, ranges, rows_ready, e, source, is_pull)
            if is_pull:
                begin = wl.at(world, received, source) + (rows.first * row) // vec * vec
            else:
                begin = received + stride * source
        count = tl.maximum(rows.count, 0)
        _take(out, num_received, source, begin, come, count, sizes, block, vec)
        come += count
        # The first rank's: on every rank the same.
        said = tl.where((said == 0) & (rows.count < 0), -rows.count, said)
    move.end(world, slot, e)
    # What is left is nobody else's business.
    if said != 0:
        if tl.program_id(0) == 0:
            tl.store(errors, said)
    _fill(out, come, sizes, block, vec)
