"""Several products of different shapes in one launch: addresses and shapes lie in device memory."""

import torch
import triton
import triton.language as tl


@triton.jit
def grouped_product(addresses, shapes, groups, T: tl.constexpr):
    tile = tl.program_id(0)
    before = 0
    for group in range(groups):
        m = tl.load(shapes + group * 3)
        n = tl.load(shapes + group * 3 + 1)
        k = tl.load(shapes + group * 3 + 2)
        tiles_n = tl.cdiv(n, T)
        tiles = tl.cdiv(m, T) * tiles_n
        a = tl.load(addresses + group * 3).to(tl.pointer_type(tl.float16))
        b = tl.load(addresses + group * 3 + 1).to(tl.pointer_type(tl.float16))
        c = tl.load(addresses + group * 3 + 2).to(tl.pointer_type(tl.float16))
        while tile >= before and tile < before + tiles:
            own = tile - before
            rows = own // tiles_n * T + tl.arange(0, T)
            columns = own % tiles_n * T + tl.arange(0, T)
            total = tl.zeros((T, T), tl.float32)
            for start in range(0, k, T):
                depth = start + tl.arange(0, T)
                left = tl.load(
                    a + rows[:, None] * k + depth[None, :],
                    mask=(rows[:, None] < m) & (depth[None, :] < k), other=0.0,
                )  # fmt: skip
                right = tl.load(
                    b + depth[:, None] * n + columns[None, :],
                    mask=(depth[:, None] < k) & (columns[None, :] < n), other=0.0,
                )  # fmt: skip
                total += tl.dot(left, right)
            inside = (rows[:, None] < m) & (columns[None, :] < n)
            tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.float16), mask=inside)
            tile += tl.num_programs(0)
        before += tiles


def grouped_gemm(pairs, programs=4, tile=16):
    outs = [torch.empty(a.shape[0], b.shape[1], dtype=a.dtype) for a, b in pairs]
    addresses = torch.tensor(
        [[a.data_ptr(), b.data_ptr(), c.data_ptr()] for (a, b), c in zip(pairs, outs, strict=True)]
    )
    shapes = torch.tensor(
        [[a.shape[0], b.shape[1], a.shape[1]] for a, b in pairs], dtype=torch.int32
    )
    grouped_product[(programs,)](addresses, shapes, len(pairs), T=tile)
    return outs
