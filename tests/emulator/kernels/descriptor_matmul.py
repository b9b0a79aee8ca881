"""A persistent matrix product on tensor descriptors, made on the host or in the kernel."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def multiply_tiles(a, b, c, m, n, k, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):
    """Each program takes every num_programs-th tile; b is transposed, [n, k]."""
    tiles_n = tl.cdiv(n, TN)
    tiles = tl.cdiv(m, TM) * tiles_n
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile // tiles_n * TM, tile % tiles_n * TN
        total = tl.zeros((TM, TN), tl.float32)
        for start in range(0, k, TK):
            left = a.load([row, start])
            right = b.load([column, start])
            total = tl.dot(left, right.T, total, input_precision="ieee")
        c.store([row, column], total.to(tl.float16))


@triton.jit
def host_made(a, b, c, m, n, k, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):
    multiply_tiles(a, b, c, m, n, k, TM, TN, TK)


@triton.jit
def kernel_made(a, b, c, m, n, k, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):
    a_tiles = tl.make_tensor_descriptor(a, shape=[m, k], strides=[k, 1], block_shape=[TM, TK])
    b_tiles = tl.make_tensor_descriptor(b, shape=[n, k], strides=[k, 1], block_shape=[TN, TK])
    c_tiles = tl.make_tensor_descriptor(c, shape=[m, n], strides=[n, 1], block_shape=[TM, TN])
    multiply_tiles(a_tiles, b_tiles, c_tiles, m, n, k, TM, TN, TK)


def matmul(a, b, on_host, programs=4, tile=32):
    """a [m, k] times b [n, k] transposed."""
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty(m, n, dtype=a.dtype)
    if on_host:
        block = [tile, tile]
        tensors = [TensorDescriptor.from_tensor(tensor, block) for tensor in (a, b, c)]
        host_made[(programs,)](*tensors, m, n, k, TM=tile, TN=tile, TK=tile)
    else:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
        kernel_made[(programs,)](a, b, c, m, n, k, TM=tile, TN=tile, TK=tile)
    return c
