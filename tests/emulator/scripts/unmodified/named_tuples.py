"""Tuples and NamedTuples of pointers, strides and constants, as arguments and as results."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()


class Matrix(NamedTuple):
    data: torch.Tensor
    rows: int
    columns: int
    strides: tuple


@triton.jit
def addresses(matrix, row, column):
    inside = (row[:, None] < matrix.rows) & (column[None, :] < matrix.columns)
    at = row[:, None] * matrix.strides[0] + column[None, :] * matrix.strides[1]
    return matrix.data + at, inside


@triton.jit
def extremes(x):
    return tl.min(x, axis=1), tl.max(x, axis=1)


@triton.jit
def spread_kernel(matrix, outs, BLOCK: tl.constexpr):
    row, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    pointers, inside = addresses(matrix, row, column)
    value = tl.load(pointers, mask=inside)
    low, _ = extremes(tl.where(inside, value, float("inf")))
    _, high = extremes(tl.where(inside, value, -float("inf")))
    results = (low, high, high - low)
    for i in tl.static_range(len(outs)):
        tl.store(outs[i] + row, results[i], mask=row < matrix.rows)


def matrix_of(x: torch.Tensor) -> Matrix:
    return Matrix(x, x.shape[0], x.shape[1], tuple(x.stride()))


for x in (torch.randn(20, 13, device=DEVICE), torch.randn(13, 20, device=DEVICE).T):
    outs = tuple(torch.empty(20, device=DEVICE) for _ in range(3))
    spread_kernel[(triton.cdiv(20, 16),)](matrix_of(x), outs, BLOCK=16)
    low, high = x.min(1).values, x.max(1).values
    for out, expected in zip(outs, (low, high, high - low), strict=True):
        torch.testing.assert_close(out, expected)
