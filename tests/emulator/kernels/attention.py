"""Fused attention: online softmax forward, and a backward pass that recomputes the weights."""

import math

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def attend(
    q, k, v, out, log_sum, scale, length,
    D: tl.constexpr, TQ: tl.constexpr, TK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * length
    rows = tl.program_id(0) * TQ + tl.arange(0, TQ)
    dims = tl.arange(0, D)
    query = tl.load(q + (head + rows[:, None]) * D + dims[None, :], rows[:, None] < length, 0.0)
    largest = tl.full([TQ], -float("inf"), tl.float32)
    weight = tl.zeros([TQ], tl.float32)
    total = tl.zeros([TQ, D], tl.float32)
    end = tl.minimum(length, (tl.program_id(0) + 1) * TQ) if CAUSAL else length
    for start in range(0, end, TK):
        columns = start + tl.arange(0, TK)
        inside = columns[:, None] < length
        at = (head + columns[:, None]) * D + dims[None, :]
        key = tl.load(k + at, mask=inside, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        seen = columns[None, :] < length
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None])
        score = tl.where(seen, score, -float("inf"))
        above = tl.maximum(largest, tl.max(score, axis=1))
        power = tl.exp2(score - above[:, None])
        fade = tl.exp2(largest - above)
        weight = weight * fade + tl.sum(power, axis=1)
        value = tl.load(v + at, mask=inside, other=0.0)
        total = total * fade[:, None]
        total = tl.dot(power.to(value.dtype), value, total, input_precision="ieee")
        largest = above
    tl.store(log_sum + head + rows, largest + tl.log2(weight), mask=rows < length)
    tl.store(
        out + (head + rows[:, None]) * D + dims[None, :], total / weight[:, None],
        mask=rows[:, None] < length,
    )  # fmt: skip


@triton.jit
def weigh_outputs(out, d_out, delta, rows, D: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = at[:, None] * D + tl.arange(0, D)[None, :]
    inside = at[:, None] < rows
    o = tl.load(out + index, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(d_out + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + at, tl.sum(o * g, axis=1), mask=at < rows)


@triton.jit
def weights_again(query, key, rows, columns, log_sum, scale, length, CAUSAL: tl.constexpr):
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    seen = (columns[None, :] < length) & (rows[:, None] < length)
    if CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None])
    return tl.where(seen, tl.exp2(score - log_sum[:, None]), 0.0)


@triton.jit
def key_value_gradient(
    q, k, v, d_out, log_sum, delta, d_k, d_v, scale, length,
    D: tl.constexpr, T: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * length
    columns = tl.program_id(0) * T + tl.arange(0, T)
    dims = tl.arange(0, D)
    own = (head + columns[:, None]) * D + dims[None, :]
    key = tl.load(k + own, mask=columns[:, None] < length, other=0.0)
    value = tl.load(v + own, mask=columns[:, None] < length, other=0.0)
    sum_k = tl.zeros([T, D], tl.float32)
    sum_v = tl.zeros([T, D], tl.float32)
    begin = tl.program_id(0) * T if CAUSAL else 0
    for start in range(begin, length, T):
        rows = start + tl.arange(0, T)
        at = (head + rows[:, None]) * D + dims[None, :]
        query = tl.load(q + at, mask=rows[:, None] < length, other=0.0)
        grad = tl.load(d_out + at, mask=rows[:, None] < length, other=0.0)
        sums = tl.load(log_sum + head + rows, mask=rows < length, other=0.0)
        p = weights_again(query, key, rows, columns, sums, scale, length, CAUSAL)
        sum_v += tl.dot(tl.trans(p.to(grad.dtype)), grad, input_precision="ieee")
        d_p = tl.dot(grad, tl.trans(value), input_precision="ieee")
        d_s = p * (d_p - tl.load(delta + head + rows, mask=rows < length, other=0.0)[:, None])
        sum_k += tl.dot(tl.trans(d_s.to(query.dtype)), query, input_precision="ieee")
    tl.store(d_k + own, sum_k * (scale * 0.6931471805599453), mask=columns[:, None] < length)
    tl.store(d_v + own, sum_v, mask=columns[:, None] < length)


@triton.jit
def query_gradient(
    q, k, v, d_out, log_sum, delta, d_q, scale, length,
    D: tl.constexpr, T: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * length
    rows = tl.program_id(0) * T + tl.arange(0, T)
    dims = tl.arange(0, D)
    own = (head + rows[:, None]) * D + dims[None, :]
    query = tl.load(q + own, mask=rows[:, None] < length, other=0.0)
    grad = tl.load(d_out + own, mask=rows[:, None] < length, other=0.0)
    sums = tl.load(log_sum + head + rows, mask=rows < length, other=0.0)
    weighed = tl.load(delta + head + rows, mask=rows < length, other=0.0)
    total = tl.zeros([T, D], tl.float32)
    end = tl.minimum(length, (tl.program_id(0) + 1) * T) if CAUSAL else length
    for start in range(0, end, T):
        columns = start + tl.arange(0, T)
        at = (head + columns[:, None]) * D + dims[None, :]
        key = tl.load(k + at, mask=columns[:, None] < length, other=0.0)
        value = tl.load(v + at, mask=columns[:, None] < length, other=0.0)
        p = weights_again(query, key, rows, columns, sums, scale, length, CAUSAL)
        d_s = p * (tl.dot(grad, tl.trans(value), input_precision="ieee") - weighed[:, None])
        total += tl.dot(d_s.to(key.dtype), key, input_precision="ieee")
    tl.store(d_q + own, total * (scale * 0.6931471805599453), mask=rows[:, None] < length)


def forward(q, k, v, causal=True, tile_q=32, tile_k=16):
    """q, k, v: [heads, length, dims]; also gives the logarithms that backward needs."""
    heads, length, dims = q.shape
    out, log_sum = torch.empty_like(q), torch.empty(heads, length)
    scale = LOG2_E / math.sqrt(dims)
    attend[(triton.cdiv(length, tile_q), heads)](
        q, k, v, out, log_sum, scale, length, D=dims, TQ=tile_q, TK=tile_k, CAUSAL=causal
    )
    return out, log_sum


def backward(q, k, v, out, log_sum, d_out, causal=True, tile=16):
    heads, length, dims = q.shape
    delta = torch.empty(heads, length)
    weigh_outputs[(triton.cdiv(heads * length, 32),)](
        out, d_out, delta, heads * length, D=dims, BLOCK=32
    )
    d_q, d_k, d_v = (torch.empty_like(q) for _ in range(3))
    scale, grid = LOG2_E / math.sqrt(dims), (triton.cdiv(length, tile), heads)
    key_value_gradient[grid](
        q, k, v, d_out, log_sum, delta, d_k, d_v, scale, length, D=dims, T=tile, CAUSAL=causal
    )
    query_gradient[grid](
        q, k, v, d_out, log_sum, delta, d_q, scale, length, D=dims, T=tile, CAUSAL=causal
    )
    return d_q, d_k, d_v
