"""Operators as programs: their plans are those of the golden files, whatever is chosen else."""

from __future__ import annotations

from pathlib import Path

import operators
import pytest
from operators import compiled

from weft.ir import device

GOLDEN = Path(__file__).parent / "golden"
WIDE = {"tiles": {"product": (128, 256, 64)}}
PLANS = {
    "ag_gemm_pull": (operators.ag_gemm, {"engines": {"gathered": "copy_engine"}, **WIDE}),
    "ag_gemm_in_place": (
        operators.ag_gemm, {"engines": {"gathered": "copy_engine"}, "on_heap": "a", **WIDE},
    ),
    "ag_gemm_push": (operators.ag_gemm, {"engines": {"gathered": "push"}, **WIDE}),
    "gemm_rs": (operators.gemm_rs, WIDE),
    "gemm_ar_two_shot": (operators.gemm_ar, {"engines": {"reduced": "push"}, **WIDE}),
    "gemm_ar_one_shot": (operators.gemm_ar, {"engines": {"reduced": "packets"}, "m": 64}),
    "all_reduce_rms_norm": (operators.all_reduce_rms_norm, {}),
    "mlp": (operators.mlp, {"engines": {"gathered": "copy_engine"}, "tiles": {
        "product": (128, 256, 64), "product_2": (128, 128, 64)}}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_is_the_golden_one(name: str):
    function, choices = PLANS[name]
    shown = device.show(compiled(function, **choices).plan.bare, places=False)
    assert shown == (GOLDEN / f"{name}.plan").read_text()
