"""Products of quantised matrices: int8 by int8 with scales, fp16 by int4 unpacked in the kernel."""

import torch
import triton
import triton.language as tl


@triton.jit
def int8_product(a, b, c, a_scale, b_scale, m, n, k, T: tl.constexpr):
    rows = tl.program_id(0) * T + tl.arange(0, T)
    columns = tl.program_id(1) * T + tl.arange(0, T)
    total = tl.zeros((T, T), tl.int32)
    for start in range(0, k, T):
        depth = start + tl.arange(0, T)
        left = tl.load(
            a + rows[:, None] * k + depth[None, :],
            mask=(rows[:, None] < m) & (depth[None, :] < k), other=0,
        )  # fmt: skip
        right = tl.load(
            b + depth[:, None] * n + columns[None, :],
            mask=(depth[:, None] < k) & (columns[None, :] < n), other=0,
        )  # fmt: skip
        total = tl.dot(left, right, total, out_dtype=tl.int32)
    by_row = tl.load(a_scale + rows, mask=rows < m, other=0.0)
    by_column = tl.load(b_scale + columns, mask=columns < n, other=0.0)
    out = total.to(tl.float32) * by_row[:, None] * by_column[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], out, mask=inside)


@triton.jit
def int4_product(a, packed, scales, c, m, n, k, GROUP: tl.constexpr, T: tl.constexpr):
    """Two weights of neighbouring rows share a byte, the even row's in the low half."""
    rows = tl.program_id(0) * T + tl.arange(0, T)
    columns = tl.program_id(1) * T + tl.arange(0, T)
    total = tl.zeros((T, T), tl.float32)
    for start in range(0, k, T):
        depth = start + tl.arange(0, T)
        half = start // 2 + tl.arange(0, T // 2)
        left = tl.load(a + rows[:, None] * k + depth[None, :], rows[:, None] < m, 0.0)
        byte = tl.load(packed + half[:, None] * n + columns[None, :], columns[None, :] < n, 0)
        low, high = (byte << 4) >> 4, byte >> 4
        pairs = tl.join(low, high)
        whole = tl.reshape(tl.permute(pairs, (0, 2, 1)), (T, T))
        scale = tl.load(
            scales + (depth[:, None] // GROUP) * n + columns[None, :], columns[None, :] < n, 0.0
        )
        total += tl.dot(left, (whole.to(tl.float32) * scale).to(tl.float16))
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.float16), mask=inside)


def int8_matmul(a, b, a_scale, b_scale, tile=32):
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n)
    grid = (triton.cdiv(m, tile), triton.cdiv(n, tile))
    int8_product[grid](a, b, c, a_scale, b_scale, m, n, k, T=tile)
    return c


def int4_matmul(a, packed, scales, group, tile=32):
    (m, k), n = a.shape, packed.shape[1]
    c = torch.empty(m, n, dtype=torch.float16)
    grid = (triton.cdiv(m, tile), triton.cdiv(n, tile))
    int4_product[grid](a, packed, scales, c, m, n, k, GROUP=group, T=tile)
    return c
