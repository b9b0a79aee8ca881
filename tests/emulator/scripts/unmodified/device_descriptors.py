"""Tensor descriptors made in the kernel, with an allocator for their workspace."""

from typing import Optional

import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()


def alloc_fn(size: int, alignment: int, stream: Optional[int]):  # noqa: UP045
    return torch.empty(size, device=DEVICE, dtype=torch.int8)


@triton.jit
def row_sums_kernel(x, out, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    source = tl.make_tensor_descriptor(
        x, shape=[M, N], strides=[N, 1], block_shape=[BLOCK_M, BLOCK_N]
    )
    target = tl.make_tensor_descriptor(out, shape=[M], strides=[1], block_shape=[BLOCK_M])
    row = tl.program_id(0) * BLOCK_M
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for column in range(0, N, BLOCK_N):
        total += tl.sum(source.load([row, column]).to(tl.float32), axis=1)
    target.store([row], total)


triton.set_allocator(alloc_fn)
for M, N in [(32, 64), (20, 40), (7, 8)]:
    x = torch.randn((M, N), device=DEVICE, dtype=torch.float16)
    out = torch.zeros((M,), device=DEVICE, dtype=torch.float32)
    row_sums_kernel[(triton.cdiv(M, 8),)](x, out, M, N, BLOCK_M=8, BLOCK_N=32)
    torch.testing.assert_close(out, x.float().sum(1), atol=1e-4, rtol=1e-4)
