"""Scripts of tests under torchrun on GPUs: every rank ends by counting what it tried."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

on_two_and_four_gpus = pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.gpu(n=n)) for n in (2, 4)]
)


def check_under_torchrun(script: str, ranks: int, counted: str = "cases") -> None:
    """Run tests/ops/scripts/`script` on so many ranks; all must say `rank R of N: C counted`."""
    path = Path(__file__).parent / "scripts" / script
    words = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} {path}"
    done = subprocess.run(
        [sys.executable, *words.split()], capture_output=True, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # Ranks share the pipe: where it is not buffered, one's word may stand in another's line.
    said = re.findall(rf"rank (\d) of \d: \d+ {counted}", done.stdout)
    assert sorted(said) == [str(rank) for rank in range(ranks)], done.stdout
