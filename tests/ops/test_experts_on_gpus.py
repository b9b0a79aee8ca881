"""On GPUs: tokens to the ranks of their experts and back, even, ragged, skewed, recorded."""

from __future__ import annotations

from launching import check_under_torchrun
from torchrun import on_two_and_four_gpus


@on_two_and_four_gpus
def test_experts_on_other_ranks(ranks):
    check_under_torchrun("experts_on_ranks.py", ranks)
