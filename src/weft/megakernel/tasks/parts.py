"""Operands that may be a product in parts along k: whoever reads one adds the parts up.

    x[i, j] = round(part 0 + part 1 + ...)      in fp32, in this order, rounded as the product is

So the sum depends on how many parts there are, and on nothing that happens while they are made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.language import triton_api as api


class Parts(NamedTuple):
    """`split_k` parts of a value, fp32, `stride` elements apart; `dtype` is the value's own.

    Write it out in the call of a task: Triton makes variables of a named tuple's constants.
    """

    first: Any
    stride: Any
    split_k: Any
    dtype: Any


is_in_parts = api.is_one_of(Parts)


@triton.jit
def load(x, offsets, mask, other):
    """Elements of x, a pointer or Parts; `other` where the mask is false."""
    if is_in_parts(x):
        total = tl.load(x.first + offsets, mask=mask, other=other)
        for part in tl.static_range(1, x.split_k):
            total += tl.load(x.first + part * x.stride + offsets, mask=mask, other=other)
        value = total.to(x.dtype)
    else:
        value = tl.load(x + offsets, mask=mask, other=other)
    return value
