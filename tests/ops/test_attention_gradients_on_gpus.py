"""On GPUs: gradients of ag_attention, against torch's own."""

from __future__ import annotations

from launching import check_under_torchrun
from torchrun import on_two_and_four_gpus


@on_two_and_four_gpus
def test_gradients_are_torchs(ranks):
    check_under_torchrun("attention_gradients.py", ranks)
