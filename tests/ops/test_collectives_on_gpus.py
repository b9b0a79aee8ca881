"""On GPUs: collectives in every dtype, in odd shapes, by every transport, in two worlds."""

from __future__ import annotations

from launching import check_under_torchrun
from torchrun import on_two_and_four_gpus


@on_two_and_four_gpus
def test_every_dtype_and_shape(ranks):
    check_under_torchrun("every_dtype.py", ranks)
