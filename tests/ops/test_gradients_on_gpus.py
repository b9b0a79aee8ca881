"""On GPUs: gradients of layers of products and of experts, eager and by torch.compile."""

from __future__ import annotations

from launching import check_under_torchrun
from torchrun import on_two_and_four_gpus


@on_two_and_four_gpus
def test_gradients(ranks):
    check_under_torchrun("gradients.py", ranks)
