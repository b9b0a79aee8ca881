"""Products that sum over the rows of all ranks: which of these come next, and splits of the sum.

A tile's segments are the rows of one channel each: own ones first, which are read in place, then
those of rank + 1, + 2, .. as they arrive. Where tiles are fewer than programs, the segments are
dealt out in splits: all tiles of a split come before those of the next, and the last split of a
tile adds up what the others have left, always in the same order. So results are the same bits in
every run, and no program waits for one that is later in the order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import mapping
from weft.tiles import fragments, gemm, swizzle


class Turns(NamedTuple):
    """What a launch is told beside how rows are split: `group_m` rows of tiles share columns;
    `pushers` communication CTAs store own rows to peers, each chunk for each rank in so many
    `pieces`. Of `splits` all but the last leave their sums of `tiles` tiles, `columns` of them side
    by side, in `partials`, and say so in `summed`: None where there is one split."""

    group_m: Any
    splits: Any
    pushers: Any
    pieces: Any
    tiles: Any
    columns: Any
    partials: Any
    summed: Any


class At(NamedTuple):
    """A tile, with one split of the rows that it sums over."""

    i_m: Any
    i_n: Any
    split: Any


class Segment(NamedTuple):
    """`rows` rows of all, from `first` on; the gathered ones from row `at` of `source`."""

    source: Any
    at: Any
    first: Any
    rows: Any


@triton.jit
def count(shape, tile_m, turns):
    """How many rows of tiles there are, in all splits."""
    return tl.cdiv(shape.m, tile_m) * turns.splits


@triton.jit
def arrange(turns):
    """For `tiles_of_split`."""
    return (tl.cast(turns.group_m, tl.int32), tl.cast(turns.splits, tl.int32))


@triton.jit
def tiles_of_split(i, num_m, num_n, args):
    """All tiles, in one split after the other. args: (group_m, splits)"""
    rows = num_m // args[1]
    split = i // (rows * num_n)
    at = swizzle.grouped(i - split * rows * num_n, rows, num_n, (args[0],))
    return At(at.i_m, at.i_n, split)


@triton.jit
def channels(split, at, turns, num_ranks: tl.constexpr):
    """How many segments the split has."""
    words = split.chunks * num_ranks
    return (at.split + 1) * words // turns.splits - at.split * words // turns.splits


@triton.jit
def channel_of(at, segment, split, turns, rank, num_ranks):
    """The word that announces a segment's rows."""
    index = at.split * (split.chunks * num_ranks) // turns.splits + segment
    return (rank + index // split.chunks) % num_ranks * split.chunks + index % split.chunks


@triton.jit
def _segment(gathered, in_place, split, at, segment, turns, rank, num_ranks):
    word = channel_of(at, segment, split, turns, rank, num_ranks)
    source_rank = word // split.chunks
    first, end = mapping.rows_of_channel(word, split)
    source = gathered
    at_row = first
    if source_rank == rank:
        source = in_place
        shard_first, _ = mapping.rows_of_rank(rank, split)
        at_row = first - shard_first
    return Segment(source, at_row, first, end - first)


@triton.jit
def left_channel(
    gathered, in_place, whole, split, at, segment, turns, rank, num_ranks: tl.constexpr
):
    """A segment's rows, of which the left operand's are gathered."""
    one = _segment(gathered, in_place, split, at, segment, turns, rank, num_ranks)
    return gemm.Contracted(one.source, whole, one.at, one.first, one.rows)


@triton.jit
def right_channel(
    gathered, in_place, whole, split, at, segment, turns, rank, num_ranks: tl.constexpr
):
    """A segment's rows, of which the right operand's are gathered."""
    one = _segment(gathered, in_place, split, at, segment, turns, rank, num_ranks)
    return gemm.Contracted(whole, one.source, one.first, one.at, one.rows)


@triton.jit
def _sums(at, split, value, turns):
    """Where a split's sums of a tile lie in `partials`."""
    rows: tl.constexpr = value.shape[0]
    columns: tl.constexpr = value.shape[1]
    tile = (split * turns.tiles + at.i_m * turns.columns + at.i_n).to(tl.int64)
    i, j = fragments.index(value, 0), fragments.index(value, 1)
    return turns.partials + tile * (rows * columns) + i[:, None] * columns + j[None, :]


@triton.jit
def add_splits(at, value, turns, e, world):
    """The last split's sums, behind those of the splits before it."""
    if turns.partials is not None:
        if at.split == turns.splits - 1:
            total = tl.zeros_like(value)
            for split in range(turns.splits - 1):
                word = turns.summed + split * turns.tiles + at.i_m * turns.columns + at.i_n
                wl.wait(word, e, scope=wl.Scope.DEVICE, world=world)
                total += tl.load(_sums(at, split, value, turns))
            value = total + value
    return value


@triton.jit
def store_or_keep(at, fragment, turns, given, last: tl.constexpr, launch):
    """Store the result of the last split; keep the sums of the others for it."""
    if turns.partials is None:
        last(given, launch)
    elif at.split == turns.splits - 1:
        last(given, launch)
    else:
        tl.store(_sums(at, at.split, fragment, turns), fragment)


@triton.jit
def announce_split(at, turns, e, rank, world):
    """The last split's program, when the sums of another split are stored."""
    if turns.partials is not None:
        if at.split < turns.splits - 1:
            word = turns.summed + at.split * turns.tiles + at.i_m * turns.columns + at.i_n
            # weft: equivalent-mutant incomplete of notify: these sums are stored by threads; only
            # the last split's stores can be asynchronous, of which this tells nobody
            wl.notify(world, word, e, to=rank, op=wl.SignalOp.SET, scope=wl.Scope.DEVICE)
