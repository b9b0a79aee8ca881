"""Autotuning with a key, early pruning, a hook, and memory that every try must find zeroed."""

import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()


def get_autotune_configs():
    return [
        triton.Config({"BLOCK_M": bm, "BLOCK_K": bk, "SPLIT": split}, num_stages=s, num_warps=w)
        for bm, bk, split, s, w in [
            (16, 32, 1, 2, 4), (32, 32, 2, 3, 4), (64, 16, 4, 4, 8), (128, 128, 1, 2, 8),
        ]
    ]  # fmt: skip


def prune(configs, named_args, **kwargs):
    return [c for c in configs if c.kwargs["BLOCK_M"] <= max(16, named_args["M"])]


@triton.autotune(
    configs=get_autotune_configs(),
    key=["M", "K"],
    reset_to_zero=["y_ptr"],
    prune_configs_by={"early_config_prune": prune},
)
@triton.jit
def matvec_kernel(
    a_ptr, x_ptr, y_ptr, M, K, stride,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for k in range(tl.program_id(1) * BLOCK_K, K, BLOCK_K * SPLIT):
        columns = k + tl.arange(0, BLOCK_K)
        mask = (rows[:, None] < M) & (columns[None, :] < K)
        a = tl.load(a_ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)
        x = tl.load(x_ptr + columns, mask=columns < K, other=0.0)
        total += tl.sum(a * x[None, :], axis=1)
    tl.atomic_add(y_ptr + rows, total, mask=rows < M)


def matvec(a, x):
    y = torch.zeros(a.shape[0], device=a.device)
    matvec_kernel[lambda META: (triton.cdiv(a.shape[0], META["BLOCK_M"]), META["SPLIT"])](
        a, x, y, a.shape[0], a.shape[1], a.stride(0)
    )
    return y


for m, k in [(100, 70), (16, 33)]:
    a, x = torch.randn(m, k, device=DEVICE), torch.randn(k, device=DEVICE)
    torch.testing.assert_close(matvec(a, x), a @ x, atol=1e-4, rtol=1e-4)
assert matvec_kernel.best_config in get_autotune_configs() or matvec_kernel.best_config
