"""The k largest of each row by sorting: values and indices travel in one integer as sort keys."""

import torch
import triton
import triton.language as tl


@triton.jit
def sortable(x):
    """fp32 as an integer that orders alike."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def largest(x, values, indices, columns, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
    # Equal values: the lower index first.
    key = (sortable(value).to(tl.int64) << 32) | (BLOCK - 1 - at).to(tl.int64)
    key = tl.sort(key, descending=True)
    index = BLOCK - 1 - (key & 0xFFFFFFFF).to(tl.int32)
    bits = (key >> 32).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    tl.store(values + row * K + at, bits.to(tl.float32, bitcast=True), mask=at < K)
    tl.store(indices + row * K + at, index, mask=at < K)


def top_k(x, k):
    rows, columns = x.shape
    values = torch.empty(rows, k)
    indices = torch.empty(rows, k, dtype=torch.int32)
    largest[(rows,)](x, values, indices, columns, K=k, BLOCK=triton.next_power_of_2(columns))
    return values, indices
