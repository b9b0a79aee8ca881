"""What was compiled ahead of time runs on GPUs in processes without Triton."""

import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import environment, torchrun

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "artefacts.py"


@pytest.mark.gpu(n=2)
def test_calls_run_without_triton(tmp_path):
    import torch

    target = f"cuda:{torch.cuda.get_device_capability()[0]}0"
    command = [sys.executable, str(SCRIPT), "build", str(tmp_path), target]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for verb in ("answer", "run"):
        for said in torchrun(SCRIPT, 2, verb, str(tmp_path)):
            assert said.strip().endswith("all right"), said
