"""Gated rows: out[i, j] = activation(h[i, j]) * h[i, columns + j], in one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_rows(h, out, columns, activation: tl.constexpr, block: tl.constexpr):
    """A row of h[rows, 2 * columns], gate before value, `block` columns of it. Rounds to the
    dtype where separate passes would, so that both ways give the same."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * block + tl.arange(0, block)
    gate = h + row * (2 * columns) + j
    here = j < columns
    dtype: tl.constexpr = h.dtype.element_ty
    share = activation(tl.load(gate, mask=here, other=0.0).to(tl.float32)).to(dtype)
    value = tl.load(gate + columns, mask=here, other=0.0)
    tl.store(out + row * columns + j, share.to(tl.float32) * value.to(tl.float32), mask=here)
