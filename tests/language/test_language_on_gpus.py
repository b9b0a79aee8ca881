"""Narrow packets between real GPUs; the same script on the emulator."""

from __future__ import annotations

import json

import exchange_storm
import language_kernels as kernels
import pytest
import triton
from language_kernels import GPUS
from torchrun import once, torchrun

from weft.verify import compiled


@triton.jit
def half_packets(world, x, flags, flags64, n):
    exchange_storm.half_packets(world, flags64, flags, flags, 1, n, 1024)


def test_on_the_emulator(ranks):
    for found in ranks(lambda: exchange_storm.main(2), 2):
        assert {row["wrong"] for row in found.values()} == {0}


@pytest.mark.few(1)
@pytest.mark.parametrize("target", GPUS)
def test_what_will_run_is_compiled_as_written(target):
    report = compiled(kernels.compiled(half_packets, target, num_warps=4))
    assert report.ok, str(report)


@pytest.mark.gpu(n=2)
@pytest.mark.parametrize("num_ranks", [2])
def test_on_gpus(num_ranks):
    first, *_ = torchrun(exchange_storm.__file__, num_ranks, "20000")
    found = json.loads(*once([first], r"({.*})"))  # a rank that finds anything wrong fails
    assert {row["wrong"] for row in found.values()} == {0}, found
