"""Lines, narrow packets and signals by warps between real GPUs; the same script on the emulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import exchange_storm
import language_kernels as kernels
import pytest
import triton
from language_kernels import CUDA, GPUS

from weft.verify import compiled

ROOT = Path(__file__).parent.parent.parent


@triton.jit
def lines(world, x, flags, flags64, n):
    exchange_storm.lines(world, flags64, flags, flags, 1, n, 16, 1024)


@triton.jit
def half_packets(world, x, flags, flags64, n):
    exchange_storm.half_packets(world, flags64, flags, flags, 1, n, 16, 1024)


@triton.jit
def by_warps(world, x, flags, flags64, n):
    exchange_storm.by_warps(world, flags64, flags, flags, 1, n, 16, 1024)


def test_on_the_emulator(ranks):
    for found in ranks(lambda: exchange_storm.main(2), 2):
        assert {row["wrong"] for row in found.values()} == {0}


@pytest.mark.parametrize(
    "kernel, target",
    [
        *((kernel, target) for kernel in (half_packets, by_warps) for target in GPUS),
        *((lines, target) for target in CUDA),
    ],
)
def test_what_will_run_is_compiled_as_written(kernel, target):
    report = compiled(kernels.compiled(kernel, target, num_warps=4))
    assert report.ok, str(report)


@pytest.mark.gpu(n=2)
@pytest.mark.parametrize("num_ranks", [2])
def test_on_gpus(num_ranks):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(num_ranks), exchange_storm.__file__, "20000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert {row["wrong"] for row in found.values()} == {0}, found
