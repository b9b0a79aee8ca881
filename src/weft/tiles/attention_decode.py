"""The decode template: attention of one query a sequence over a cache of keys and values.

    out[b, h, :] = softmax over j of (q[b, h, :] . k[b, j, g, :] * scale) @ v[b, j, g, :]

where j < lengths[b] and g = h // group: the `group` query heads that share a head of the cache are
the rows of one tile, so that each key and value is read once; or of several, `blocks`, where they
are more than tile.rows. A tile is one (sequence, head of the cache and block of rows). Where there
are fewer of them than programs, the cache is split: unit u of a launch is split u % splits of tile
u // splits, and program p has units p, p + programs, ...

    for unit in this program's share, if its split has any of the tile's keys:
        out, lse = attend(split)                     the mean of its values, log of its sum
        where the tile has more than one such split:
            out, lse -> partials;  the last of its programs to come here merges all of them, in
            the order of splits
        emit(at, out, lse)                           once per tile

A split is a range of keys that follows from the length alone, in whole tiles of keys; so results
are the same bits each time, for one number of splits. What has no keys is emitted too: zeros, and
-inf as its lse.

    emit(at, out, lse, tile, args)       out: fp32 [tile.rows, tile.d], lse: fp32 [tile.rows]

The cache lies as [sequences, max_kv, kv_heads, d] (`Contiguous`), or in pages of which a table says
which are a sequence's (`Paged`): its type decides how it is read. `one_tile` is a whole tile in one
go, for tasks of a persistent kernel.

Limits  d up to MOST_COLUMNS; a launch's programs use one `partials`, which calls use in turns
Source  flash-decode (Dao et al. 2023); weft.tiles.softmax
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import triton_api as api
from weft.tiles import softmax

MOST_COLUMNS = 256


class At(NamedTuple):
    """A tile: sequence i_m; i_n = head of the cache * blocks + block, most often just the head."""

    i_m: Any
    i_n: Any


class Shape(NamedTuple):
    """Extents: `group` query heads for each of kv_heads, d elements to a head, caches of max_kv
    keys a sequence."""

    batch: Any
    kv_heads: Any
    group: Any
    d: Any
    max_kv: Any


class Tile(NamedTuple):
    """Powers of two: query heads at a time, keys at a time, columns that a head fits in;
    `as_constexpr` in kernels."""

    rows: Any
    n: Any
    d: Any

    def as_constexpr(self) -> Tile:
        return Tile(*map(tl.constexpr, self))


class Contiguous(NamedTuple):
    """k, v: [batch, max_kv, kv_heads, d]."""

    k: Any
    v: Any


class Paged(NamedTuple):
    """k, v: [pages, page, kv_heads, d]; key j of a sequence is in its page table[sequence, j //
    page], an int32 of `width` in a row."""

    k: Any
    v: Any
    table: Any
    page: Any
    width: Any


class Partials(NamedTuple):
    """Where programs that share a tile meet.

    out: fp32 [units, tile.rows, tile.d], lse: fp32 [units, tile.rows], of the split of each unit.
    come: int32[tiles], how many of a tile's splits are there: 0 before and after each call.
    """

    out: Any
    lse: Any
    come: Any


class Stored(NamedTuple):
    """Arguments of `emit_store`: out is [batch, kv_heads * group, d]."""

    out: Any
    shape: Any


@api.builtin
def is_paged(cache, _semantic=None):
    return api.constexpr(api.tuple_fields(cache) == Paged._fields)


@triton.jit
def without_constants(shape):
    """As it is, for records that have it with other records of constants: Triton 3.6, for which an
    extent of 1 is a constant, mixes them up."""
    return Shape(
        tl.cast(shape.batch, tl.int32),
        tl.cast(shape.kv_heads, tl.int32),
        tl.cast(shape.group, tl.int32),
        tl.cast(shape.d, tl.int32),
        tl.cast(shape.max_kv, tl.int32),
    )


@triton.jit
def blocks_of(shape, tile):
    """How many tiles the heads of a group are."""
    return tl.cdiv(shape.group, tile.rows)


@triton.jit
def tiles_of(shape, tile):
    """How many tiles there are."""
    return shape.batch * shape.kv_heads * blocks_of(shape, tile)


@triton.jit
def tile_at(t, shape, tile):
    """Which tile is the t-th."""
    of_sequence = shape.kv_heads * blocks_of(shape, tile)
    return At(t // of_sequence, t % of_sequence)


@triton.jit
def number_of(at, shape, tile):
    """The opposite of `tile_at`."""
    return at.i_m * (shape.kv_heads * blocks_of(shape, tile)) + at.i_n


@triton.jit
def keys_of_split(length, splits, tile_n):
    """How many keys each split has, the last with any may have fewer. `.fn` is the same on Python
    integers."""
    return (length + tile_n * splits - 1) // (tile_n * splits) * tile_n


@triton.jit
def splits_with_keys(length, keys, splits):
    """How many splits have something to do; one, where there is nothing."""
    count = (length + keys - 1) // max(keys, 1)
    return min(max(count, 1), splits)


@triton.jit
def length_of(lengths, sequence, shape):
    """How many keys a sequence has; what does not fit in the cache is not there."""
    return min(max(tl.load(lengths + sequence), 0), shape.max_kv)


@triton.jit
def decode(
    q,
    cache,
    lengths,
    shape,
    scale,
    splits,
    tile,
    partials,
    program,
    num_programs,
    emit: tl.constexpr,
    emit_args,
):
    """This program's share of all tiles; call it from a kernel. partials: Partials

    Sync    what the hook does; programs that share a tile count themselves, and none waits
    """
    for unit in tl.range(program, tiles_of(shape, tile) * splits, num_programs, flatten=False):
        t = unit // splits
        at, split = tile_at(t, shape, tile), unit - t * splits
        length = length_of(lengths, at.i_m, shape)
        keys = keys_of_split(length, splits, tile.n)
        # Where `splits` is the constant 1, nothing is shared and no counter is compiled.
        live = splits if splits == 1 else splits_with_keys(length, keys, splits)
        if split < live:
            first = split * keys
            out, lse = attend(at, q, cache, first, min(first + keys, length), shape, scale, tile)
            if live == 1:
                emit(at, out, lse, tile, emit_args)
            else:
                _share(at, t, unit, out, lse, live, splits, tile, partials, emit, emit_args)


@triton.jit
def one_tile(
    at, q, cache, lengths, shape, scale, tile, emit: tl.constexpr, emit_args
):  # fmt: skip
    """The tile of the record `at`, all of its keys."""
    length = length_of(lengths, at.i_m, shape)
    out, lse = attend(at, q, cache, 0, length, shape, scale, tile)
    emit(at, out, lse, tile, emit_args)


@triton.jit
def attend(at, q, cache, first, end, shape, scale, tile):
    """(out, lse) of keys first .. end - 1: both in fp32, `lse` by the natural logarithm."""
    queries = _load_queries(at, q, shape, tile)
    column, head = tl.arange(0, tile.d), at.i_n // blocks_of(shape, tile)
    high, total, mean = softmax.begin(tile.rows, tile.d)
    for key in range(first, end, tile.n):
        j = key + tl.arange(0, tile.n)
        there = _keys_at(cache, at.i_m, j, end, shape).to(tl.int64) * shape.kv_heads + head
        place = there[:, None] * shape.d + column[None, :]
        mask = (j < end)[:, None] & (column < shape.d)[None, :]
        keys = tl.load(cache.k + place, mask=mask, other=0.0)
        values = tl.load(cache.v + place, mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        scores = tl.where((j < end)[None, :], scores * (scale * softmax.LOG2_E), float("-inf"))
        high, total, mean = softmax.absorb(high, total, mean, scores, values)
    return softmax.finish(high, total, mean)


@triton.jit
def _load_queries(at, q, shape, tile):
    """The heads of a group, [tile.rows, tile.d]; zeros outside."""
    place, mask = places(at, shape, tile)
    return tl.load(q + place, mask=mask, other=0.0)


@triton.jit
def places(at, shape, tile):
    """Where a tile lies in [batch, kv_heads * group, d], and what of it there is."""
    row, there = rows_of(at, shape, tile)
    column, head = tl.arange(0, tile.d), at.i_n // blocks_of(shape, tile)
    row += (at.i_m.to(tl.int64) * shape.kv_heads + head) * shape.group
    return row[:, None] * shape.d + column[None, :], there[:, None] & (column < shape.d)[None, :]


@triton.jit
def rows_of(at, shape, tile):
    """Which of a group's heads are a tile's rows, and whether there are such."""
    row = at.i_n % blocks_of(shape, tile) * tile.rows + tl.arange(0, tile.rows)
    return row, row < shape.group


@triton.jit
def _keys_at(cache, sequence, j, end, shape):
    """Which rows of the cache the keys j are: rows of [.., kv_heads, d]."""
    if is_paged(cache):
        table = cache.table + sequence.to(tl.int64) * cache.width
        page = tl.load(table + j // cache.page, mask=j < end, other=0)
        row = page.to(tl.int64) * cache.page + j % cache.page
    else:
        row = sequence.to(tl.int64) * shape.max_kv + j
    return row


@triton.jit
def emit_store(at, out, lse, tile, args):
    """args: Stored"""
    place, mask = places(at, args.shape, tile)
    tl.store(args.out + place, out.to(args.out.dtype.element_ty), mask=mask)


@triton.jit
def _share(
    at, t, unit, out, lse, live, splits, tile, partials, emit: tl.constexpr, emit_args
):  # fmt: skip
    """A split's part is stored; whoever is the last of its tile merges all and emits."""
    tl.store(_cells(partials.out, unit, tile), out)
    row = tl.arange(0, tile.rows)
    tl.store(partials.lse + unit * tile.rows + row, lse)
    # weft: equivalent-mutant drop of complete_stores: parts are not stored asynchronously
    come = wl.atomic_add(partials.come + t, 1, order=wl.Order.ACQ_REL, scope=wl.Scope.DEVICE)
    if come == live - 1:
        # Nobody counts any more in this call.
        tl.store(partials.come + t, 0)
        high, total, mean = softmax.begin(tile.rows, tile.d)
        for other in range(t * splits, t * splits + live):
            part = tl.load(_cells(partials.out, other, tile))
            weight = tl.load(partials.lse + other * tile.rows + row)
            high, total, mean = softmax.merge(high, total, mean, part, weight)
        mean, log = softmax.finish(high, total, mean)
        emit(at, mean, log, tile, emit_args)


@triton.jit
def _cells(out, unit, tile):
    """Pointers to a unit's part."""
    row, column = tl.arange(0, tile.rows), tl.arange(0, tile.d)
    return out + (tl.cast(unit, tl.int64) * tile.rows + row[:, None]) * tile.d + column[None, :]


def partial_elements(units: int, rows: int, columns: int) -> tuple[int, int]:
    """How many fp32 elements `Partials.out` and `Partials.lse` must hold."""
    return units * rows * columns, units * rows
