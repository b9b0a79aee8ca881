"""What a result must say about where it comes from, and where it is kept."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """GPUs, driver, commit and versions; the commit from WEFT_COMMIT where there is no git."""
    import torch
    import triton

    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "driver": driver.splitlines()[0] if driver else "",
        "commit": os.environ.get("WEFT_COMMIT") or _output("git", "rev-parse", "--short", "HEAD"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
    }


def clocks() -> list[dict[str, float]]:
    """Each GPU's SM clock (MHz), power (W) and temperature (C) now; empty where not to be had."""
    query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
    found = []
    for line in _output("nvidia-smi", query, "--format=csv,noheader,nounits").splitlines():
        words = re.findall(r"[\d.]+", line)
        if len(words) == 3:
            found.append(dict(zip(("sm_mhz", "watts", "celsius"), map(float, words))))
    return found


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def results_name(name: str, device: str, num_ranks: int) -> str:
    """`ag_gemm_h200x4.json`: one current file for each subject and hardware."""
    name = re.sub(r"\W+", "_", name)  # of a program, whose name is a path
    # NVIDIA H200, NVIDIA H100 80GB HBM3
    model = re.search(r"\b[A-Z]+\d+[A-Z]*\b", device)
    word = model.group() if model else device.split()[-1]
    return f"{name}_{word.lower()}x{num_ranks}.json"


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all: a run that is cut off leaves what was written before. Lists of records
    take a line for each, so that a new measurement reads well as a change."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    half.write_text("{\n" + ",\n".join(_entries(document)) + "\n}\n")
    half.replace(path)


def _entries(document: dict[str, Any]) -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines = ",\n".join(f"  {json.dumps(one)}" for one in value)
            yield f' "{name}": [\n{lines}\n ]'
        else:
            yield f' "{name}": {json.dumps(value)}'


def save(name: str, document: Any, num_ranks: int, folder: Path) -> Path:
    """Write a probe's document for this machine's GPUs into `folder`, or $OUT where it is set."""
    import torch

    where = Path(os.environ.get("OUT", folder))
    path = where / results_name(name, torch.cuda.get_device_name(0), num_ranks)
    write_json(path, document)
    return path
