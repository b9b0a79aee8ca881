"""The online softmax: a weighted mean of values, of which scores come part by part.

    out[r, :]  =  sum over j of p[r, j] * values[j, :] / sum over j of p[r, j],   p = exp(score)
    lse[r]     =  log(sum over j of p[r, j])

A `State` is three tensors, all fp32; both its sums are weighted by exp(score - high).

Scores are in units of log2(e): callers fold LOG2_E into their scale, and exp is exp2. What is
masked has a score of -inf. A row without anything has out = 0 and lse = -inf, never NaN; NaN in
scores or values stays NaN.

Source  Milakov and Gimelshein 2018; FlashAttention (Dao et al. 2022); its split form, flash-decode
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class State(NamedTuple):
    """high: [rows], the largest score so far; total: [rows]; out: [rows, columns]"""

    high: Any
    total: Any
    out: Any


@triton.jit
def begin(rows: tl.constexpr, columns: tl.constexpr):
    """The state of nothing."""
    high = tl.full((rows,), float("-inf"), tl.float32)
    return State(high, tl.zeros((rows,), tl.float32), tl.zeros((rows, columns), tl.float32))


@triton.jit
def above(scores, high):
    """2 ** (scores - high), where -inf over -inf is 0."""
    return tl.exp2(scores - tl.where(high == float("-inf"), 0.0, high))


@triton.jit
def absorb(state, scores, values):
    """The state with one part more. scores: fp32 [rows, n]; values: [n, columns]"""
    peak = tl.maximum(state.high, tl.max(scores, axis=1))
    fade, share = above(state.high, peak), above(scores, peak[:, None])
    total = state.total * fade + tl.sum(share, axis=1)
    out = state.out * fade[:, None]
    out = tl.dot(share.to(values.dtype), values, out, input_precision="ieee")
    return State(peak, total, out)


@triton.jit
def merge(state, other, lse):
    """The state with another one that is finished: `other` [rows, columns] and `lse` [rows]."""
    there = lse * LOG2_E
    peak = tl.maximum(state.high, there)
    fade, share = above(state.high, peak), above(there, peak)
    out = state.out * fade[:, None] + other * share[:, None]
    return State(peak, state.total * fade + share, out)


@triton.jit
def finish(state):
    """(out, lse): the mean, and the natural logarithm of the sum."""
    # Not `total > 0`, which would take NaN for nothing.
    whole = tl.where(state.total == 0.0, 1.0, state.total)
    return state.out / whole[:, None], (state.high + tl.log2(whole)) * LN_2
