"""The online softmax: a weighted mean of values, of which scores come part by part.

    out[r, :]  =  sum over j of p[r, j] * values[j, :] / sum over j of p[r, j],   p = exp(score)
    lse[r]     =  log(sum over j of p[r, j])

A state is three tensors, all fp32: `high` [rows], the largest score so far; `total` [rows] and
`out` [rows, columns], both sums weighted by exp(score - high). They are handed on one by one, not
as a record, since they are carried through loops.

Scores are in units of log2(e): callers fold LOG2_E into their scale, and exp is exp2. What is
masked has a score of -inf. A row without anything has out = 0 and lse = -inf, never NaN; NaN in
scores or values stays NaN.

Source  Milakov and Gimelshein 2018; FlashAttention (Dao et al. 2022); its split form, flash-decode
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def begin(rows: tl.constexpr, columns: tl.constexpr):
    """The state of nothing."""
    high = tl.full((rows,), float("-inf"), tl.float32)
    return high, tl.zeros((rows,), tl.float32), tl.zeros((rows, columns), tl.float32)


@triton.jit
def above(scores, high):
    """2 ** (scores - high), where -inf over -inf is 0."""
    return tl.exp2(scores - tl.where(high == float("-inf"), 0.0, high))


@triton.jit
def absorb(high, total, out, scores, values):
    """The state with one part more. scores: fp32 [rows, n]; values: [n, columns]"""
    peak = tl.maximum(high, tl.max(scores, axis=1))
    fade, share = above(high, peak), above(scores, peak[:, None])
    total = total * fade + tl.sum(share, axis=1)
    out = out * fade[:, None]
    out = tl.dot(share.to(values.dtype), values, out, input_precision="ieee")
    return peak, total, out


@triton.jit
def merge(high, total, out, other, lse):
    """The state with another one that is finished: `other` [rows, columns] and `lse` [rows]."""
    there = lse * LOG2_E
    peak = tl.maximum(high, there)
    fade, share = above(high, peak), above(there, peak)
    return peak, total * fade + share, out * fade[:, None] + other * share[:, None]


@triton.jit
def finish(high, total, out):
    """(out, lse): the mean, and the natural logarithm of the sum."""
    # Not `total > 0`, which would take NaN for nothing.
    whole = tl.where(total == 0.0, 1.0, total)
    return out / whole[:, None], (high + tl.log2(whole)) * LN_2
