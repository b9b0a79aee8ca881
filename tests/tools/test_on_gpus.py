"""On GPUs: an operator by the command line, and every example under torchrun, unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import environment, once, torchrun

pytestmark = pytest.mark.gpu(n=2)

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = [
    path for path in sorted((ROOT / "examples").glob("[0-9]*.py")) if "bug" not in path.name
]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "float8_e4m3fn"])
def test_run_an_operator(dtype: str):
    words = f"-m weft run ag_gemm --target cuda --ranks 2 --dtype {dtype} --json"
    command = [sys.executable, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(done.stdout)
    assert values["target"] == "cuda" and values["ok"] is True


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_under_torchrun(example: Path):
    assert once(torchrun(example, 2), r"rank (\d)\b.*") == ["0", "1"]
