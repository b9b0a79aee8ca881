"""The attention template backwards: gradients of queries, and of keys and values, in tiles.

    share  =  exp(scale * q k^T - lse)                of what is visible; made again, not kept
    slope  =  share * (dout v^T - delta),             delta = sum over d of (dout * out) - dlse
    dq     =  scale * slope k;     dk  =  scale * slope^T q;     dv  =  share^T dout

Two bodies of the kernel `attention_gradients`, launched one after the other. `queries_tile` has a
tile of queries, as weft.tiles.attention has, and goes through the keys that it meets; it stores
`delta`, and which keys each query sees, for the other. `keys_tile` has tile.n keys of one head and
goes through the queries that see any of them: head by head of those that share it, from the first
token up. Each result is stored by one program, in one order of sums, so there is no atomic and
results are the same bits each time. Keys that no query sees, and queries that see none, get zeros.

Tiles, which keys a query sees (`visible`), and where everything lies are those of
weft.tiles.attention, with keys that all lie together: position j is row j. A tile holds queries of
one head (tile.pack is 1).

Keys may be one block of several (`adds`): then lse is that of all blocks, and what is found is
added to what lies there. Which keys of it each query sees is `is_listed`, in lo and hi, beforehand.

Source  Dao et al., FlashAttention (2022), appendix B; Dao, FlashAttention-2 (2023)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.tiles import attention, softmax, swizzle


class Given(NamedTuple):
    """What `keys_tile` reads, and `queries_tile`, which makes the last three. q, out, dout:
    [tokens, q_heads, d]; k, v: [positions, kv_heads, d]; lse, delta: fp32 [tokens, q_heads]; lo,
    hi: int32 [tokens], an attention.Bounds for each"""

    q: Any
    k: Any
    v: Any
    out: Any
    dout: Any
    lse: Any
    delta: Any
    lo: Any
    hi: Any


class Where(NamedTuple):
    """Own queries begin at position `first` of `positions`; `sequences`, whose number + 1 has
    `steps` binary digits; the number of own queries has `halves`."""

    first: Any
    positions: Any
    sequences: Any
    steps: Any
    halves: Any


@triton.jit
def queries_tile(at, given, dlse, dq, shape, tile, seen, causal: tl.constexpr,
                 is_listed: tl.constexpr = False, adds: tl.constexpr = False):  # fmt: skip
    """dq of a tile of one head, and its `delta`. dlse: as lse, or None; dq: as q"""
    at = attention.met(at, shape, tile, seen, causal)
    token = attention.tokens_of(at, shape, tile)
    bounds = attention.visible(token, seen, causal)
    queries = attention.load_rows(given.q, at, shape, tile)
    slopes = attention.load_rows(given.dout, at, shape, tile)
    out = attention.load_rows(given.out, at, shape, tile)
    place, there = attention.numbers_of(at, shape, tile)
    delta = tl.sum(slopes.to(tl.float32) * out.to(tl.float32), axis=1)
    if dlse is not None:
        delta -= tl.load(dlse + place, mask=there, other=0.0)
    tl.store(given.delta + place, delta, mask=there)
    if not is_listed:
        if at.i_n == 0:
            tl.store(given.lo + token, bounds.lo, mask=there)
            tl.store(given.hi + token, bounds.hi, mask=there)
    log = tl.load(given.lse + place, mask=there, other=0.0) * softmax.LOG2_E
    total = tl.zeros((tile.m, tile.d), tl.float32)
    for position in range(at.lo, at.hi, tile.n):
        j = position + tl.arange(0, tile.n)
        k = attention.load_keys(given.k, at, j, j < at.hi, shape, tile)
        v = attention.load_keys(given.v, at, j, j < at.hi, shape, tile)
        x = tl.dot(queries, k.T, input_precision="ieee") * shape.scale
        mask = (j >= bounds.lo[:, None]) & (j < bounds.hi[:, None])
        # Of a query that sees nothing lse is -inf, and the difference NaN.
        share = tl.where(mask, tl.exp2(x - log[:, None]), 0.0)
        slope = share * (tl.dot(slopes, v.T, input_precision="ieee") - delta[:, None])
        total = tl.dot(slope.to(k.dtype), k, total, input_precision="ieee")
    total *= shape.scale * softmax.LN_2
    if adds:
        total += attention.load_rows(dq, at, shape, tile).to(tl.float32)
    attention.store_rows(dq, total, at, shape, tile)


@triton.jit
def keys_tile(i, kv_head, given, dk, dv, positions, steps, shape, tile,
              adds: tl.constexpr = False):  # fmt: skip
    """dk and dv of positions i * tile.n .. of a head of keys. Behind `queries_tile` of all.

    dk, dv: as k and v, contiguous; steps: shape.tokens in binary has so many digits, at most
    """
    group = shape.q_heads // shape.kv_heads
    first = i * tile.n
    j = first + tl.arange(0, tile.n)
    at = swizzle.At(0, kv_head * group)
    k = attention.load_keys(given.k, at, j, j < positions, shape, tile)
    v = attention.load_keys(given.v, at, j, j < positions, shape, tile)
    last = tl.minimum(first + tile.n, positions) - 1
    begin = attention.count_up_to(given.hi, first, shape.tokens, steps)
    end = attention.count_up_to(given.lo, last, shape.tokens, steps)
    row = begin // tile.tokens
    rows = tl.maximum(tl.cdiv(end, tile.tokens) - row, 0)
    sum_k = tl.zeros((tile.n, tile.d), tl.float32)
    sum_v = tl.zeros((tile.n, tile.d), tl.float32)
    for turn in range(0, group * rows):
        at = swizzle.At(row + turn % rows, kv_head * group + turn // rows)
        queries = attention.load_rows(given.q, at, shape, tile)
        slopes = attention.load_rows(given.dout, at, shape, tile)
        place, there = attention.numbers_of(at, shape, tile)
        token = attention.tokens_of(at, shape, tile)
        lo = tl.load(given.lo + token, mask=there, other=0)
        hi = tl.load(given.hi + token, mask=there, other=0)
        log = tl.load(given.lse + place, mask=there, other=0.0) * softmax.LOG2_E
        delta = tl.load(given.delta + place, mask=there, other=0.0)
        # Keys by queries: no product has to be turned.
        x = tl.dot(k, queries.T, input_precision="ieee") * shape.scale
        seen = (j[:, None] >= lo[None, :]) & (j[:, None] < hi[None, :])
        share = tl.where(seen, tl.exp2(x - log[None, :]), 0.0)
        sum_v = tl.dot(share.to(v.dtype), slopes, sum_v, input_precision="ieee")
        slope = share * (tl.dot(v, slopes.T, input_precision="ieee") - delta[None, :])
        sum_k = tl.dot(slope.to(k.dtype), queries, sum_k, input_precision="ieee")
    c = tl.arange(0, tile.d)
    row = j.to(tl.int64) * shape.kv_heads + kv_head
    there = row[:, None] * shape.d + c[None, :]
    mask = (j < positions)[:, None] & (c < shape.d)[None, :]
    sum_k *= shape.scale * softmax.LN_2
    if adds:
        sum_k += tl.load(dk + there, mask=mask, other=0.0).to(tl.float32)
        sum_v += tl.load(dv + there, mask=mask, other=0.0).to(tl.float32)
    tl.store(dk + there, sum_k.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + there, sum_v.to(dv.dtype.element_ty), mask=mask)


@triton.jit
def attention_gradients(given, dlse, dq, dk, dv, cu_seqlens, shape, where, tile,
                        of_keys: tl.constexpr, causal: tl.constexpr,
                        is_listed: tl.constexpr = False,
                        adds: tl.constexpr = False):  # fmt: skip
    """A tile to a program: of dq, or (`of_keys`) of dk and dv, in a launch after the other."""
    i = tl.program_id(0)
    if of_keys:
        positions = tl.cast(where.positions, tl.int32)
        keys_tile(
            i // shape.kv_heads, i % shape.kv_heads, given, dk, dv, positions, where.halves,
            shape, tile, adds,
        )  # fmt: skip
    else:
        if is_listed:
            seen = attention.Listed(given.lo, given.hi)
        else:
            seen = attention.seen_by(
                cu_seqlens, where.sequences, where.steps, where.first, where.positions
            )
        at = attention.last_first(i, tl.num_programs(0) // shape.q_heads, shape.q_heads)
        queries_tile(at, given, dlse, dq, shape, tile, seen, causal, is_listed, adds)
