"""The litmus programs on real GPUs, briefly; benchmarks/litmus.py runs a million of each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import environment

ROOT = Path(__file__).parent.parent.parent


def run(tmp_path, ranks, part):
    command = [sys.executable, str(ROOT / "benchmarks" / "litmus.py"), "--ranks", str(ranks)]
    command += ["--launches", "2", "--rounds", "500", "--engine-rounds", "200", "--part", part]
    done = subprocess.run(command, env=environment(OUT=str(tmp_path)), capture_output=True,
                          text=True, timeout=280)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(next(tmp_path.glob("litmus_*.json")).read_text())


@pytest.mark.gpu(n=4)
def test_nothing_forbidden_is_seen(tmp_path):
    rows = run(tmp_path, 4, "words")["words"]
    assert len(rows) > 60
    assert not [row["name"] for row in rows if row["forbidden_seen"]]


@pytest.mark.gpu(n=2)
def test_blocks_arrive_whole(tmp_path):
    results = run(tmp_path, 2, "blocks,engine")
    rows = results["blocks"] + results["engine"] + results["engine_large"]
    assert not [row["name"] for row in rows if row["promised"] and row["stale_elements"]]
