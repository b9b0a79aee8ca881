"""On GPUs: gemm_rs, gemm_ar and all_reduce_rms_norm in every way, even, ragged and tiny."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).parent / "scripts" / "every_product.py"


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.gpu(n=n)) for n in (2, 4)])
def test_every_product(ranks):
    words = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} {SCRIPT}"
    done = subprocess.run(
        [sys.executable, *words.split()], capture_output=True, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = re.findall(r"^rank (\d) of \d: \d+ cases", done.stdout, re.MULTILINE)
    assert sorted(said) == [str(rank) for rank in range(ranks)]
