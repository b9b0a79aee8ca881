"""Scripts by somebody else, run through the command line as a user would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.tools.main import main

SCRIPTS = Path(__file__).parent / "scripts"


def words(script: str, *arguments: str, ranks: int = 4) -> list[str]:
    told = ["emulate", "--ranks", str(ranks), "--json", "--seed", "0", str(SCRIPTS / script)]
    return [*told, "--", *arguments]


def line_of(script: str, mark: str) -> int:
    for number, line in enumerate((SCRIPTS / script).read_text().splitlines(), 1):
        if line.endswith(f"# {mark}"):
            return number
    raise AssertionError(mark)


def test_clean_script_with_raw_atomics(capsys):
    assert main(words("raw_ring.py")) == 0, capsys.readouterr()


def test_planted_race_is_named(capsys):
    assert main(words("raw_ring.py", "--fault", "race")) == 1
    races = json.loads(capsys.readouterr().out)["races"]
    line = line_of("raw_ring.py", "RACE")
    assert any(line in (race["first"]["line"], race["second"]["line"]) for race in races)
    assert all(race["first"]["file"].endswith("raw_ring.py") for race in races)


def test_planted_deadlock_is_named(capsys):
    assert main(words("raw_ring.py", "--fault", "deadlock")) == 1
    deadlocks = json.loads(capsys.readouterr().out)["deadlocks"]
    lines = {found["first"]["line"] for found in deadlocks}
    assert line_of("raw_ring.py", "DEADLOCK") in lines


def test_gpu_scope_across_ranks_is_a_race(capsys):
    assert main(words("raw_ring.py", "--fault", "scope")) == 1
    assert json.loads(capsys.readouterr().out)["races"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_script_without_weft(ranks, capsys):
    assert main(words("data_parallel.py", "hello", ranks=ranks)) == 0
    told = capsys.readouterr()
    assert told.err.count("hello") + told.out.count("hello") >= ranks
