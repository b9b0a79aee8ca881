"""Several worlds in one process, sub-groups among them: emulated, and under torchrun on GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).parent / "scripts" / "several_worlds.py"


def run(*words: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return re.findall(r"^rank (\d of \d)", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_emulated():
    said = run("-m", "weft", "emulate", str(SCRIPT), "--ranks", "3")
    assert sorted(said) == ["0 of 3", "1 of 3", "2 of 3"]


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.gpu(n=n)) for n in (2, 4)])
def test_under_torchrun(ranks):
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}"
    said = run(*launcher.split(), str(SCRIPT))
    assert sorted(said) == [f"{rank} of {ranks}" for rank in range(ranks)]
