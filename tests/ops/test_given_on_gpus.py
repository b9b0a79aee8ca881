"""On GPUs: calls that are given DTensors, or torch.autocast, eager and by torch.compile."""

from __future__ import annotations

from launching import check_under_torchrun
from torchrun import on_two_and_four_gpus


@on_two_and_four_gpus
def test_dtensors_and_autocast(ranks):
    check_under_torchrun("given.py", ranks)
