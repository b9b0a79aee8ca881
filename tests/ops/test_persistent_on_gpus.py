"""On GPUs: programs as one persistent kernel a rank, and a decode step."""

from __future__ import annotations

from launching import check_under_torchrun
from torchrun import on_two_and_four_gpus


@on_two_and_four_gpus
def test_programs_as_one_kernel(ranks):
    check_under_torchrun("persistent_programs.py", ranks, counted="programs")


@on_two_and_four_gpus
def test_a_decode_step(ranks):
    check_under_torchrun("decode_step.py", ranks, counted="steps")
