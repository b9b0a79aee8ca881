"""Dropout whose mask is never stored: forward and backward draw it again from the seed."""

import torch
import triton
import triton.language as tl


@triton.jit
def drop(x, out, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, at) > p
    value = tl.load(x + at, mask=at < n)
    tl.store(out + at, tl.where(keep, value / (1 - p), 0.0), mask=at < n)


@triton.jit
def draw(uniform, normal, integers, four, n, seed, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(uniform + at, tl.rand(seed, at), mask=at < n)
    tl.store(normal + at, tl.randn(seed, at), mask=at < n)
    tl.store(integers + at, tl.randint(seed, at), mask=at < n)
    parts = tl.randint4x(seed, at)
    for i in tl.static_range(4):
        tl.store(four + i * n + at, parts[i], mask=at < n)


def dropout(x: torch.Tensor, p: float, seed: int, block: int = 128) -> torch.Tensor:
    out = torch.empty_like(x)
    drop[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), p, seed, BLOCK=block)
    return out
