"""The decode template: attention of one query a sequence over a cache of keys and values.

    out[b, h, :] = softmax over j of (q[b, h, :] . k[b, j, g, :] * scale) @ v[b, j, g, :]

where j < lengths[b] and g is the head of the cache that h shares. Tiles are those of
weft.tiles.attention with one token, a sequence's, and `tile.pack` heads that share their keys, so
that each key and value is read once for these. Where there are fewer tiles than programs, the cache
is split: unit u of a launch is split u % splits of tile u // splits, and program p has units p,
p + programs, ...

    for unit in this program's share, if its split has any of the tile's keys:
        out, lse = attend(split)                     the mean of its values, log of its sum
        where the tile has more than one such split:
            out, lse -> partials;  the last of its programs to come here merges all of them, in
            the order of splits
        emit(at, out, lse)                           once per tile

A split is a range of keys that follows from the length alone, in whole tiles of keys; so results
are the same bits each time, for one number of splits. What has no keys is emitted too: zeros, and
-inf as its lse.

    emit(at, out, lse, tile, args)       out: fp32 [tile.m, tile.d], lse: fp32 [tile.m]

The cache lies as [sequences, max_kv, kv_heads, d] (`Contiguous`), or in pages of which a table says
which are a sequence's (`Paged`): its type decides how it is read. `one_tile` is a whole tile in one
go, for tasks of a persistent kernel.

Limits  a launch's programs use one `partials`, which calls use in turns
Source  flash-decode (Dao et al. 2023); weft.tiles.softmax
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import triton_api as api
from weft.tiles import attention, softmax, swizzle


def pack_of(group: int, rows: int) -> int:
    """How many of `group` heads that share their keys a tile of so many rows has: they divide."""
    return next(pack for pack in range(min(group, rows), 0, -1) if group % pack == 0)


class Contiguous(NamedTuple):
    """k, v: [batch, max_kv, kv_heads, d]."""

    k: Any
    v: Any
    max_kv: Any


class Paged(NamedTuple):
    """k, v: [pages, page, kv_heads, d]; key j of a sequence is in its page table[sequence, j //
    page], an int32 of `width` in a row; max_kv is page * width."""

    k: Any
    v: Any
    max_kv: Any
    table: Any
    page: Any
    width: Any


class Partials(NamedTuple):
    """Where programs that share a tile meet.

    out: fp32 [units, tile.m, tile.d], lse: fp32 [units, tile.m], of the split of each unit.
    come: int32[tiles], how many of a tile's splits are there: 0 before and after each call.
    """

    out: Any
    lse: Any
    come: Any


class Stored(NamedTuple):
    """Arguments of `emit_store`: out as q."""

    out: Any
    shape: Any


is_paged = api.is_one_of(Paged)


@triton.jit
def without_constants(shape):
    """As it is, for records that have it with other records of constants: Triton 3.6, for which an
    extent of 1 is a constant, mixes them up."""
    return attention.Shape(
        tl.cast(shape.tokens, tl.int32),
        tl.cast(shape.q_heads, tl.int32),
        tl.cast(shape.kv_heads, tl.int32),
        tl.cast(shape.d, tl.int32),
        tl.cast(shape.scale, tl.float32),
    )


@triton.jit
def tiles_of(shape, tile):
    """How many tiles there are."""
    return shape.tokens * (shape.q_heads // tile.pack)


@triton.jit
def tile_at(t, shape, tile):
    """Which tile is the t-th: i_m is a sequence, i_n a block of heads."""
    blocks = shape.q_heads // tile.pack
    return swizzle.At(t // blocks, t % blocks)


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
def length_of(lengths, sequence, cache):
    """How many keys a sequence has; what does not fit in the cache is not there."""
    return min(max(tl.load(lengths + sequence), 0), cache.max_kv)


@triton.jit
def decode(
    q,
    cache,
    lengths,
    shape,
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
        length = length_of(lengths, at.i_m, cache)
        keys = keys_of_split(length, splits, tile.n)
        # Where `splits` is the constant 1, nothing is shared and no counter is compiled.
        live = splits if splits == 1 else splits_with_keys(length, keys, splits)
        if split < live:
            first = split * keys
            out, lse = attend(at, q, cache, first, min(first + keys, length), shape, tile)
            if live == 1:
                emit(at, out, lse, tile, emit_args)
            else:
                _share(at, t, unit, out, lse, live, splits, tile, partials, emit, emit_args)


@triton.jit
def one_tile(at, q, cache, lengths, shape, tile, emit: tl.constexpr, emit_args):
    """The tile of the record `at`, all of its keys."""
    length = length_of(lengths, at.i_m, cache)
    out, lse = attend(at, q, cache, 0, length, shape, tile)
    emit(at, out, lse, tile, emit_args)


@triton.jit
def attend(at, q, cache, first, end, shape, tile):
    """(out, lse) of keys first .. end - 1: both in fp32, `lse` by the natural logarithm."""
    queries = attention.load_rows(q, at, shape, tile)
    state = softmax.begin(tile.m, tile.d)
    for key in range(first, end, tile.n):
        j = key + tl.arange(0, tile.n)
        row = _rows_at(cache, at.i_m, j, end)
        keys = attention.load_keys(cache.k, at, row, j < end, shape, tile)
        values = attention.load_keys(cache.v, at, row, j < end, shape, tile)
        scores = tl.dot(queries, keys.T, input_precision="ieee")
        scores = tl.where((j < end)[None, :], scores * shape.scale, float("-inf"))
        state = softmax.absorb(state, scores, values)
    return softmax.finish(state)


@triton.jit
def _rows_at(cache, sequence, j, end):
    """Which rows of the cache the keys j are: rows of [.., kv_heads, d]."""
    if is_paged(cache):
        table = cache.table + sequence.to(tl.int64) * cache.width
        page = tl.load(table + j // cache.page, mask=j < end, other=0)
        row = page.to(tl.int64) * cache.page + j % cache.page
    else:
        row = sequence.to(tl.int64) * cache.max_kv + j
    return row


@triton.jit
def emit_store(at, out, lse, tile, args):
    """args: Stored"""
    attention.store_rows(args.out, out, at, args.shape, tile)


@triton.jit
def _share(
    at, t, unit, out, lse, live, splits, tile, partials, emit: tl.constexpr, emit_args
):  # fmt: skip
    """A split's part is stored; whoever is the last of its tile merges all and emits."""
    tl.store(_cells(partials.out, unit, tile), out)
    row = tl.arange(0, tile.m)
    tl.store(partials.lse + unit * tile.m + row, lse)
    # weft: equivalent-mutant drop of complete_stores: parts are not stored asynchronously
    come = wl.atomic_add(partials.come + t, 1, order=wl.Order.ACQ_REL, scope=wl.Scope.DEVICE)
    if come == live - 1:
        # Nobody counts any more in this call.
        tl.store(partials.come + t, 0)
        state = softmax.begin(tile.m, tile.d)
        for other in range(t * splits, t * splits + live):
            part = tl.load(_cells(partials.out, other, tile))
            state = softmax.merge(state, part, tl.load(partials.lse + other * tile.m + row))
        mean, log = softmax.finish(state)
        emit(at, mean, log, tile, emit_args)


@triton.jit
def _cells(out, unit, tile):
    """Pointers to a unit's part."""
    row, column = tl.arange(0, tile.m), tl.arange(0, tile.d)
    return out + (tl.cast(unit, tl.int64) * tile.m + row[:, None]) * tile.d + column[None, :]
