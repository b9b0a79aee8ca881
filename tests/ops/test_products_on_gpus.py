"""On GPUs: gemm_rs, gemm_ar, ag_wgrad, all_reduce_rms_norm, flash_decode and ag_attention."""

from __future__ import annotations

from launching import check_under_torchrun
from torchrun import on_two_and_four_gpus


@on_two_and_four_gpus
def test_every_product(ranks):
    check_under_torchrun("every_product.py", ranks)
