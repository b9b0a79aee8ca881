"""Activations as device functions; one of them calls a function of another module."""

import triton
import triton.language as tl

from .constants import SQRT_HALF, logistic


@triton.jit
def gelu(x):
    return 0.5 * x * (1 + tl.erf(x * SQRT_HALF))


@triton.jit
def silu(x):
    return x * logistic(x)
