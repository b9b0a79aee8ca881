"""A global constant that kernels read, and a function on top of which others are built."""

import triton
import triton.language as tl

SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)


@triton.jit
def logistic(x):
    return 1 / (1 + tl.exp(-x))
