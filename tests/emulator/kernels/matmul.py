"""Matrix products on pointers: grouped order with autotuning and an activation, and split-k."""

import torch
import triton
import triton.language as tl


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.jit
def grouped(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Tiles in bands of GROUP rows, so that a band's operands stay in the cache."""
    per_band = GROUP * tiles_n
    first = pid // per_band * GROUP
    height = min(tiles_m - first, GROUP)
    return first + pid % per_band % height, pid % per_band // height


@triton.autotune(
    configs=[
        triton.Config({"TM": 32, "TN": 32, "TK": 32, "GROUP": 2}, num_warps=4),
        triton.Config({"TM": 64, "TN": 32, "TK": 16, "GROUP": 4}, num_warps=8, num_stages=4),
    ],
    key=["m", "n", "k"],
)
@triton.heuristics({"EVEN_K": lambda args: args["k"] % args["TK"] == 0})
@triton.jit
def product(
    a, b, c, m, n, k, am, ak, bk, bn, cm, cn,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    i_m, i_n = grouped(tl.program_id(0), tl.cdiv(m, TM), tl.cdiv(n, TN), GROUP)
    # Rows beyond the edge are wrapped around, and not stored.
    rows = (i_m * TM + tl.arange(0, TM)) % m
    columns = (i_n * TN + tl.arange(0, TN)) % n
    depth = tl.arange(0, TK)
    a_ptrs = a + rows[:, None] * am + depth[None, :] * ak
    b_ptrs = b + depth[:, None] * bk + columns[None, :] * bn
    total = tl.zeros((TM, TN), tl.float32)
    for step in range(tl.cdiv(k, TK)):
        if EVEN_K:
            left, right = tl.load(a_ptrs), tl.load(b_ptrs)
        else:
            left = tl.load(a_ptrs, mask=depth[None, :] < k - step * TK, other=0.0)
            right = tl.load(b_ptrs, mask=depth[:, None] < k - step * TK, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        a_ptrs += TK * ak
        b_ptrs += TK * bk
    if ACTIVATION == "leaky_relu":
        total = leaky_relu(total)
    rows = i_m * TM + tl.arange(0, TM)
    columns = i_n * TN + tl.arange(0, TN)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * cm + columns[None, :] * cn, total.to(c.dtype.element_ty), inside)


@triton.jit
def split_product(
    a, b, c, m, n, k, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, SPLIT: tl.constexpr
):
    rows = tl.program_id(0) * TM + tl.arange(0, TM)
    columns = tl.program_id(1) * TN + tl.arange(0, TN)
    total = tl.zeros((TM, TN), tl.float32)
    for start in range(tl.program_id(2) * TK, k, TK * SPLIT):
        depth = start + tl.arange(0, TK)
        left = tl.load(
            a + rows[:, None] * k + depth[None, :],
            mask=(rows[:, None] < m) & (depth[None, :] < k), other=0.0,
        )  # fmt: skip
        right = tl.load(
            b + depth[:, None] * n + columns[None, :],
            mask=(depth[:, None] < k) & (columns[None, :] < n), other=0.0,
        )  # fmt: skip
        total = tl.dot(left, right, total, input_precision="ieee")
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.atomic_add(c + rows[:, None] * n + columns[None, :], total, mask=inside, sem="relaxed")


def matmul(a, b, activation=""):
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=a.dtype)
    grid = lambda meta: (triton.cdiv(m, meta["TM"]) * triton.cdiv(n, meta["TN"]),)  # noqa: E731
    product[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(), ACTIVATION=activation)
    return c


def split_k(a, b, split=3, tile=32):
    (m, k), n = a.shape, b.shape[1]
    c = torch.zeros(m, n)
    grid = (triton.cdiv(m, tile), triton.cdiv(n, tile), split)
    split_product[grid](a, b, c, m, n, k, TM=tile, TN=tile, TK=tile, SPLIT=split)
    return c
