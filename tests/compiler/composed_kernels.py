"""Kernels that the compiler makes of the golden plans; run it to write anew what is launched.

PYTHONPATH=src:tests python tests/compiler/composed_kernels.py
"""

from __future__ import annotations

from pathlib import Path

from ir_reader import read

from weft.compiler.lower import kernels, source
from weft.ir import core, device

GOLDEN = Path(__file__).parent / "golden"
PLANS = (
    "ag_gemm_put", "ag_gemm_push", "ag_gemm_pushers", "ag_gemm_scaled", "gemm_rs",
    "gemm_rs_staged", "gemm_rs_scaled", "gemm_ar_two_shot", "gemm_a2a", "a2a_gemm",
    "all_reduce_rms_norm", "all_reduce_rms_norm_few", "all_reduce_rms_norm_twice", "mlp", "ag_moe",
    "moe", "moe_rs",
)  # fmt: skip


def kernel_of(plan: str) -> core.Kernel:
    """The kernel of a golden plan's first product."""
    return next(iter(kernels.lower(read(device, (GOLDEN / f"{plan}.plan").read_text())).values()))


if __name__ == "__main__":
    for name in PLANS:
        (GOLDEN / f"{name}.launch").write_text(f"{source.shown(kernel_of(name))}\n")
