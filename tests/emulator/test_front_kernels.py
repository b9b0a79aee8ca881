"""Whole kernels through the emulator's front: softmax, matmul, descriptors, helper calls."""

import pytest
import torch
import triton
import triton.language as tl
from front_runtime import launch

from weft.base.dtypes import tolerance


def close(out, expected, dtype, k=1):
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error <= tolerance(str(dtype), k), float(error)


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_masked_add(dtype):
    x, y = (torch.randn(100).mul(100).to(dtype) for _ in range(2))
    out = torch.full((128,), 7).to(dtype)
    launch(add_kernel, x, y, out, 100, grid=(4,), BLOCK=32)
    assert torch.equal(out[:100], x + y)
    assert torch.equal(out[100:], torch.full((28,), 7).to(dtype))


@triton.jit
def softmax_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + i, mask=i < columns, other=-float("inf"))
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + row * columns + i, e / tl.sum(e, axis=0), mask=i < columns)


def test_softmax():
    x = torch.randn(5, 100)
    out = torch.zeros_like(x)
    launch(softmax_kernel, x, out, 100, grid=(5,), BLOCK=128)
    torch.testing.assert_close(out, torch.softmax(x, 1))


@triton.jit
def matmul_kernel(a, b, c, m, n, k, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):
    i_m = tl.program_id(0) * TM + tl.arange(0, TM)
    i_n = tl.program_id(1) * TN + tl.arange(0, TN)
    i_k = tl.arange(0, TK)
    a_ptrs = a + i_m[:, None] * k + i_k[None, :]
    b_ptrs = b + i_k[:, None] * n + i_n[None, :]
    acc = tl.zeros((TM, TN), tl.float32)
    for start in range(0, k, TK):
        x = tl.load(a_ptrs, mask=(i_m[:, None] < m) & (i_k[None, :] < k - start), other=0.0)
        y = tl.load(b_ptrs, mask=(i_k[:, None] < k - start) & (i_n[None, :] < n), other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
        a_ptrs += TK
        b_ptrs += TK * n
    mask = (i_m[:, None] < m) & (i_n[None, :] < n)
    tl.store(c + i_m[:, None] * n + i_n[None, :], acc.to(c.dtype.element_ty), mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m, n, k", [(32, 32, 32), (50, 37, 45), (1, 16, 7)])
def test_matmul(dtype, m, n, k):
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    c = torch.zeros(m, n, dtype=dtype)
    grid = (triton.cdiv(m, 16), triton.cdiv(n, 32))
    launch(matmul_kernel, a, b, c, m, n, k, grid=grid, TM=16, TN=32, TK=16)
    close(c, a.double() @ b.double(), dtype, k)


@triton.jit
def descriptor_kernel(a, b, m, n, TM: tl.constexpr, TN: tl.constexpr):
    source = tl.make_tensor_descriptor(a, [m, n], [n, 1], [TM, TN])
    target = tl.make_tensor_descriptor(b, [m, n], [n, 1], [TM, TN])
    for i in range(0, m, TM):
        for j in range(0, n, TN):
            target.store([i, j], source.load([i, j]) * 2)
    target.atomic_add([0, 0], source.load([0, 0]))


def test_descriptors_with_ragged_edges():
    a = torch.randn(20, 24)
    b = torch.zeros_like(a)
    launch(descriptor_kernel, a, b, 20, 24, TM=8, TN=16)
    expected = a * 2
    expected[:8, :16] += a[:8, :16]
    torch.testing.assert_close(b, expected)
