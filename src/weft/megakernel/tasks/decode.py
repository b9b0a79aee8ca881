"""Tasks of a decode step: one new token of each sequence, its place in the caches, its attention.

    rope         halves of each head turned against each other by the angles of lengths[i] - 1
    rope_by_table    the same by row positions[i] of a table [positions, head]: cosines, then sines
    embedding    row ids[i] of a table, which has `rows` rows from `first` on: zeros for others
    kv_append    x[i] -> row lengths[i] - 1 of sequence i's part of the cache, in place
    attention    one sequence and head of the cache, all keys, by weft.tiles.attention_decode
    attention_parts  the same of one split of the keys: row i * splits + s of out is split s of
                 sequence i; of each head of the queries its mean, then as many columns of which the
                 first is its lse and the others are not written
    merge_parts  the means of all splits of a sequence and head, weighted by their sums

Shapes  x, q: [m, n], rows stride_x elements apart; lengths, positions: int32 [1, m]; caches:
        max_kv rows of each sequence, one behind the other; `head` columns to a head. x of rope,
        rope_by_table and kv_append may be parts.Parts
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.megakernel.tasks import parts
from weft.tiles import angles, attention_decode, fragments, softmax, swizzle
from weft.tiles import attention as tiles


@triton.jit
def _load_halves(at, x, m, n, stride_x, head: tl.constexpr, tile):
    """A tile, what stands across in each head's other half, and the sign with which that comes."""
    i = at.i_m * tile.m + tl.arange(0, tile.m)
    j = at.i_n * tile.n + tl.arange(0, tile.n)
    mask = (i < m)[:, None] & (j < n)[None, :]
    is_first = j % head < head // 2
    row = i.to(tl.int64)[:, None] * stride_x
    own = parts.load(x, row + j[None, :], mask, 0.0).to(tl.float32)
    across = tl.where(is_first, j + head // 2, j - head // 2)
    other = parts.load(x, row + across[None, :], mask, 0.0).to(tl.float32)
    return own, other * tl.where(is_first, -1.0, 1.0)[None, :], i, j


@triton.jit
def rope(
    at, x, lengths, m, n, stride_x, head: tl.constexpr, log2_base: tl.constexpr, tile,
    emit: tl.constexpr, emit_args,
):  # fmt: skip
    own, other, i, j = _load_halves(at, x, m, n, stride_x, head, tile)
    position = tl.load(lengths + i, mask=i < m, other=1) - 1
    speed = tl.exp2((j % (head // 2)).to(tl.float32) * (-2.0 * log2_base / head))
    cos, sin = angles.cos_sin(position.to(tl.float32)[:, None] * speed[None, :])
    emit(at, fragments.whole(at, tile), own * cos + other * sin, emit_args)


@triton.jit
def rope_by_table(
    at, x, positions, table, m, n, stride_x, head: tl.constexpr, tile, emit: tl.constexpr, emit_args
):  # fmt: skip
    own, other, i, j = _load_halves(at, x, m, n, stride_x, head, tile)
    position = tl.load(positions + i, mask=i < m, other=0).to(tl.int64)
    there = table + position[:, None] * head + (j % (head // 2))[None, :]
    cos, sin = tl.load(there), tl.load(there + head // 2)
    emit(at, fragments.whole(at, tile), own * cos + other * sin, emit_args)


@triton.jit
def embedding(
    at, table, ids, m, n, rows, stride, first, tile, emit: tl.constexpr, emit_args
):  # fmt: skip
    i = at.i_m * tile.m + tl.arange(0, tile.m)
    j = at.i_n * tile.n + tl.arange(0, tile.n)
    row = tl.load(ids + i, mask=i < m, other=-1) - first
    mask = ((row >= 0) & (row < rows))[:, None] & (j < n)[None, :]
    there = table + row.to(tl.int64)[:, None] * stride + j[None, :]
    value = tl.load(there, mask=mask, other=0.0).to(tl.float32)
    emit(at, fragments.whole(at, tile), value, emit_args)


@triton.jit
def kv_append(at, cache, x, lengths, max_kv, n, stride_x, stride, tile):
    """A row that has no place in the cache goes nowhere."""
    row = tl.load(lengths + at.i_m) - 1
    j = at.i_n * tile.n + tl.arange(0, tile.n)
    value = parts.load(x, at.i_m.to(tl.int64) * stride_x + j, j < n, 0.0)
    there = cache + (at.i_m.to(tl.int64) * max_kv + row) * stride + j
    tl.store(there, value, mask=(j < n) & (row >= 0) & (row < max_kv))


# Splits that are merged at a time.
MERGED = tl.constexpr(32)


@triton.jit
def _shape_of(m, n, kv_n, head: tl.constexpr):
    # Numbers of a tuple in a tuple must not be constants, as 1 is one for Triton.
    return attention_decode.without_constants(
        tiles.Shape(m, n // head, kv_n // head, head, head**-0.5 * softmax.LOG2_E)
    )


@triton.jit
def attention(at, q, k, v, lengths, m, n, kv_n, max_kv, head: tl.constexpr, out, tile):
    """Rows of q, out and the caches lie close: a rank has whole heads, as many as all others."""
    shape = _shape_of(m, n, kv_n, head)
    attention_decode.one_tile(
        at, q, attention_decode.Contiguous(k, v, max_kv), lengths, shape, tile,
        attention_decode.emit_store, attention_decode.Stored(out, shape),
    )  # fmt: skip


@triton.jit
def attention_parts(
    at, q, k, v, lengths, m, n, kv_n, max_kv, splits, head: tl.constexpr, out, tile
):  # fmt: skip
    """Rows of out lie close too."""
    shape = _shape_of(m, n, kv_n, head)
    sequence, split = at.i_m // splits, at.i_m % splits
    cache = attention_decode.Contiguous(k, v, max_kv)
    length = attention_decode.length_of(lengths, sequence, cache)
    keys = attention_decode.keys_of_split(length, splits, tile.n)
    first = split * keys
    mean, lse = attention_decode.attend(
        swizzle.At(sequence, at.i_n), q, cache, first, min(first + keys, length), shape, tile
    )
    row, column = tl.arange(0, tile.m), tl.arange(0, tile.d)
    there = out + at.i_m.to(tl.int64) * (2 * n) + (at.i_n * tile.pack + row) * (2 * head)
    is_head = row < tile.pack
    inside = is_head[:, None] & (column < head)[None, :]
    tl.store(there[:, None] + column[None, :], mean, mask=inside)
    tl.store(there + head, lse, mask=is_head)


@triton.jit
def merge_parts(
    at, means, splits, stride_x, head: tl.constexpr, tile, emit: tl.constexpr, emit_args
):  # fmt: skip
    column = tl.arange(0, tile.n)
    high, total = tl.cast(float("-inf"), tl.float32), tl.cast(0.0, tl.float32)
    value = tl.zeros((tile.n,), tl.float32)
    for first in range(0, splits, MERGED):
        split = first + tl.arange(0, MERGED)
        row = means + (at.i_m * splits + split).to(tl.int64) * stride_x + at.i_n * (2 * head)
        is_there = split < splits
        lse = tl.load(row + head, mask=is_there, other=float("-inf")) * softmax.LOG2_E
        part = tl.load(row[:, None] + column[None, :], mask=is_there[:, None], other=0.0)
        peak = tl.maximum(high, tl.max(lse, axis=0))
        fade, share = softmax.above(high, peak), softmax.above(lse, peak)
        value = value * fade + tl.sum(part * share[:, None], axis=0)
        total = total * fade + tl.sum(share, axis=0)
        high = peak
    value = value / tl.where(total == 0.0, 1.0, total)
    emit(at, fragments.whole(at, tile), value[None, :], emit_args)
