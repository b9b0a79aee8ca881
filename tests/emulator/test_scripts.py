"""Scripts by somebody else, run through the command line as a user would."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).parent / "scripts"
SOURCE = pathlib.Path(__file__).parents[2] / "src"


def emulate(script: str, *arguments: str, ranks: int = 4, seed: int = 0):
    command = [sys.executable, "-m", "weft", "emulate", "--ranks", str(ranks), "--json"]
    command += ["--seed", str(seed), str(SCRIPTS / script), "--", *arguments]
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": path}
    )


def line_of(script: str, mark: str) -> int:
    for number, line in enumerate((SCRIPTS / script).read_text().splitlines(), 1):
        if line.endswith(f"# {mark}"):
            return number
    raise AssertionError(mark)


def test_clean_script_with_raw_atomics():
    run = emulate("raw_ring.py")
    assert run.returncode == 0, run.stdout + run.stderr


def test_planted_race_is_named():
    run = emulate("raw_ring.py", "--fault", "race")
    assert run.returncode == 1, run.stdout + run.stderr
    races = json.loads(run.stdout)["races"]
    line = line_of("raw_ring.py", "RACE")
    assert any(line in (race["first"]["line"], race["second"]["line"]) for race in races)
    assert all(race["first"]["file"].endswith("raw_ring.py") for race in races)


def test_planted_deadlock_is_named():
    run = emulate("raw_ring.py", "--fault", "deadlock")
    assert run.returncode == 1, run.stdout + run.stderr
    deadlocks = json.loads(run.stdout)["deadlocks"]
    lines = {found["first"]["line"] for found in deadlocks}
    assert line_of("raw_ring.py", "DEADLOCK") in lines


def test_gpu_scope_across_ranks_is_a_race():
    run = emulate("raw_ring.py", "--fault", "scope")
    assert run.returncode == 1, run.stdout + run.stderr
    assert json.loads(run.stdout)["races"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_script_without_weft(ranks):
    run = emulate("data_parallel.py", "hello", ranks=ranks)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr.count("hello") + run.stdout.count("hello") >= ranks
