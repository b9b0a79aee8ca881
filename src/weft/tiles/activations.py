"""Activations: functions of one element, in fp32, for templates in Triton and in Gluon."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """x * sigmoid(x)"""
    return x / (1 + tl.exp(-x))


@triton.jit
def gelu(x):
    """x times the share of the normal distribution below x."""
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    """gelu by its approximation x / 2 * (1 + tanh(u)), which is x * sigmoid(2 u)."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1 + tl.exp(-2 * u))
