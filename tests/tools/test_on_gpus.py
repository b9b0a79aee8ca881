"""On GPUs: an operator by the command line, and every example under torchrun, unchanged."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu(n=2)

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = [
    path for path in sorted((ROOT / "examples").glob("[0-9]*.py")) if "bug" not in path.name
]


def python(*words: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=environment
    )


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "float8_e4m3fn"])
def test_run_an_operator(dtype: str):
    words = f"-m weft run ag_gemm --target cuda --ranks 2 --dtype {dtype} --json"
    done = python(*words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(done.stdout)
    assert values["target"] == "cuda" and values["ok"] is True


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_under_torchrun(example: Path):
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
    done = python(*launcher.split(), str(example))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"\brank \d", done.stdout)) == 2, done.stdout
