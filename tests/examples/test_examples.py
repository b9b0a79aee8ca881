"""Every example runs on emulated ranks; the one with a bug is found out, with its lines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
BUG = "05_find_the_bug.py"


def emulate(example: Path, ranks: int, *options: str) -> subprocess.CompletedProcess:
    words = ["emulate", str(example), "--ranks", str(ranks), *options]
    return subprocess.run(
        [sys.executable, "-m", "weft", *words], capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_it_is_complete_and_says_how_to_run_it(example: Path):
    text = example.read_text()
    assert f"weft emulate examples/{example.name} --ranks 4" in text
    assert "weft.init()" in text and "assert " in text


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.name != BUG], ids=lambda p: p.name)
def test_it_runs_and_nothing_is_found(example: Path, ranks: int):
    done = emulate(example, ranks, "--seed", str(ranks))
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if re.match(r"rank \d", line)]
    assert len(told) == ranks, done.stdout


def test_the_bug_is_found_with_both_lines():
    done = emulate(ROOT / "examples" / BUG, 4, "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    lines = (ROOT / "examples" / BUG).read_text().splitlines()
    race = report["races"][0]
    guilty = {lines[race[side]["line"] - 1].strip() for side in ("first", "second")}
    assert guilty == {
        "wl.put(world, inbox + at, travelling, to=right)",
        "travelling = tl.load(inbox + at)",
    }
    assert race["first"]["kernel"] == "ring_sum"
    assert race["first"]["tensor"] == race["second"]["tensor"]


def test_the_tutorial_speaks_of_every_example():
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    for example in EXAMPLES:
        assert f"examples/{example.name}" in tutorial
