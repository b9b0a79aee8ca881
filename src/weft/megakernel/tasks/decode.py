"""Tasks of a decode step: one new token of each sequence, its place in the caches, its attention.

    rope         halves of each head turned against each other by the angles of lengths[i] - 1
    kv_append    x[i] -> row lengths[i] - 1 of sequence i's part of the cache, in place
    attention    one sequence and head of the cache, all keys, by weft.tiles.attention_decode

Shapes  x, q: [m, n], rows stride_x elements apart; lengths: int32 [1, m]; caches: max_kv rows of
        each sequence, one behind the other; `head` columns to a head
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.tiles import attention_decode, fragments


@triton.jit
def cos_sin(angle):
    """(cos, sin), wrong by about 1e-7 for each unit of the angle, as an angle in fp32 is too.

    By polynomials within an eighth of a turn, then the quarter that it lies in: the libraries'
    functions need local memory for angles that no position has.

    Source  Cephes, sinf.c
    """
    turns = angle * 0.15915494309189535
    quarter = tl.floor(turns * 4 + 0.5)
    rest = (turns - quarter * 0.25) * 6.283185307179586
    square = rest * rest
    sin = rest + rest * square * (
        -1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4)
    )
    cos = (
        1
        - square * 0.5
        + square
        * square
        * (4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5))
    )
    quadrant = quarter.to(tl.int32) & 3
    is_odd = (quadrant & 1) == 1
    cos, sin = tl.where(is_odd, sin, cos), tl.where(is_odd, cos, sin)
    is_back = (quadrant == 1) | (quadrant == 2)
    return tl.where(is_back, -cos, cos), tl.where(quadrant >= 2, -sin, sin)


@triton.jit
def rope(
    at, x, lengths, m, n, stride_x, head: tl.constexpr, log2_base: tl.constexpr, tile,
    emit: tl.constexpr, emit_args,
):  # fmt: skip
    half: tl.constexpr = head // 2
    i = at.i_m * tile.m + tl.arange(0, tile.m)
    j = at.i_n * tile.n + tl.arange(0, tile.n)
    mask = (i < m)[:, None] & (j < n)[None, :]
    is_first = j % head < half
    row = x + i.to(tl.int64)[:, None] * stride_x
    own = tl.load(row + j[None, :], mask=mask, other=0.0).to(tl.float32)
    across = tl.where(is_first, j + half, j - half)
    other = tl.load(row + across[None, :], mask=mask, other=0.0).to(tl.float32)
    position = tl.load(lengths + i, mask=i < m, other=1) - 1
    speed = tl.exp2((j % half).to(tl.float32) * (-2.0 * log2_base / head))
    angle = position.to(tl.float32)[:, None] * speed[None, :]
    sign = tl.where(is_first, -1.0, 1.0)
    cos, sin = cos_sin(angle)
    emit(at, fragments.whole(at, tile), own * cos + other * sin * sign[None, :], emit_args)


@triton.jit
def kv_append(at, cache, x, lengths, max_kv, n, stride_x, stride, tile):
    """A row that has no place in the cache goes nowhere."""
    row = tl.load(lengths + at.i_m) - 1
    j = at.i_n * tile.n + tl.arange(0, tile.n)
    value = tl.load(x + at.i_m.to(tl.int64) * stride_x + j, mask=j < n, other=0.0)
    there = cache + (at.i_m.to(tl.int64) * max_kv + row) * stride + j
    tl.store(there, value, mask=(j < n) & (row >= 0) & (row < max_kv))


@triton.jit
def attention(at, q, k, v, lengths, m, n, kv_n, max_kv, head: tl.constexpr, out, tile):
    """Rows of q, out and the caches lie close: a rank has whole heads, as many as all others."""
    # Numbers of a tuple in a tuple must not be constants, as 1 is one for Triton.
    shape = attention_decode.Shape(
        tl.cast(m, tl.int32), tl.cast(kv_n // head, tl.int32), tl.cast(n // kv_n, tl.int32),
        tl.cast(head, tl.int32), tl.cast(max_kv, tl.int32),
    )  # fmt: skip
    attention_decode.one_tile(
        at, q, attention_decode.Contiguous(k, v), lengths, shape, head**-0.5, tile,
        attention_decode.emit_store, attention_decode.Stored(out, shape),
    )  # fmt: skip
