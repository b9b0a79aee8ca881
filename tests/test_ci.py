"""What CI runs: to end in time, to say what was left out, and to come round to every test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TURNS, leave_few_cases, turns_until_due

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def pytest_of(*arguments: str, folder: str = "base") -> list[str]:
    """Lines that pytest prints of some quick tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *arguments, str(TESTS / folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def names(lines: list[str]) -> list[str]:
    return [line for line in lines if "::" in line]


@pytest.mark.slow
def test_no_test_begins_when_time_is_over_and_it_is_said_how_many():
    lines = pytest_of("--seconds", "0")
    assert "skipped" in lines[-1] and "passed" not in lines[-1]
    count = re.search(r"(\d+) skipped", lines[-1])
    assert count and f"left out for want of time: {count[1]} of {count[1]} tests" in "\n".join(
        lines
    )
    in_time = pytest_of("--seconds", "100", folder="base/test_spans.py")
    assert "skipped" not in in_time[-1]
    assert any(line.startswith("left out for want of time: 0 of ") for line in in_time)


def due_in(name: str) -> list[int]:
    """Of 23 turns in a row, those in which a test is due."""
    return [
        turn for turn in range(1007, 1007 + TURNS)
        if not turns_until_due(SimpleNamespace(nodeid=name, config=SimpleNamespace(
            getoption=lambda _, turn=turn: turn)))
    ]  # fmt: skip


@pytest.mark.slow
def test_in_any_turns_in_a_row_each_test_runs_once_be_there_time_or_not():
    every = names(pytest_of("--collect-only"))
    assert {len(due_in(name)) for name in every} == {1}
    turn = due_in(every[0])[0]
    lines = pytest_of("--seconds", "0", "--turn", str(turn), "-rpP")
    ran = [line.removeprefix("PASSED ") for line in lines if line.startswith("PASSED ")]
    assert sorted(ran) == sorted(name for name in every if due_in(name) == [turn])


def test_turns_that_skip_some_come_round_too():
    """CI sees a submission's last commit only: of turns that are k apart each of 23 comes, as 23 is
    a prime."""
    assert all(TURNS % divisor for divisor in range(2, TURNS))


@pytest.mark.slow
def test_slow_tests_take_turns_among_themselves():
    """What is due comes first of the tests that are chosen, whatever stands between them."""
    folder = "verify/exploration/test_exploration_search.py"
    first, second = (
        names(pytest_of("--collect-only", "-m", "slow", "--turn", turn, folder=folder))
        for turn in ("5", "6")
    )
    assert first != second and sorted(first) == sorted(second) and len(first) > 2 * TURNS
    # What is due next time stands behind what is due now.
    next_time = second[: len(second) // TURNS // 2]
    assert next_time and set(next_time) <= set(first[: len(first) // 2])
    assert set(next_time).isdisjoint(first[: len(next_time)])


MAKE = """#!/bin/bash
words=("$@")
[ "$1" = --no-print-directory ] && words=("${words[@]:1}")
echo "${words[*]} LIMIT_S=${LIMIT_S:-}" >> "$MAKES"
[ "${words[0]}" = test ] && echo "== 7 passed in 1.00s =="
[ "${words[0]}" != "$FAILS" ]
"""


def ci(tmp_path: Path, *, fails: str = "", **environment: str) -> tuple[int, list[str], list[str]]:
    """Run .ci/run with another `make`: (exit status, what it said, what it made)."""
    (tmp_path / "bin").mkdir()
    make = tmp_path / "bin" / "make"
    make.write_text(MAKE)
    make.chmod(0o755)
    (tmp_path / "bin" / "chromium").symlink_to("/bin/true")
    makes = tmp_path / "makes"
    paths = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "MAKES": str(makes)}
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "run")], capture_output=True, text=True, timeout=60,
        env={**os.environ, "CI_MINUTES": "", **environment, **paths, "FAILS": fails},
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), makes.read_text().splitlines()


def test_all_parts_run_within_75_minutes(tmp_path):
    code, said, made = ci(tmp_path)
    assert code == 0 and said[-1] == "== 7 passed in 1.00s =="
    assert [line.split()[0] for line in made] == [
        "setup",
        "lint",
        "test",
        "test-slow",
        "test-versions",
    ]
    slow, versions = (int(re.search(r"--seconds (\d+)", line)[1]) for line in made[-2:])
    # No test begins later, and the last one has until the 85th minute.
    assert 60 * 60 < slow < versions <= 75 * 60
    limit = int(re.search(r"LIMIT_S=(\d+)", made[-1])[1])
    assert versions < limit <= 85 * 60
    turns = {re.search(r"--turn (\d+)", line)[1] for line in made[-2:]}
    assert len(turns) == 1
    assert re.search(r"VERSIONS=3\.(7\.1|9\.0) ", made[-1])


def test_where_time_is_over_no_part_is_left_out_without_a_word(tmp_path):
    """What is due runs, and pytest says how many tests were left out."""
    code, said, made = ci(tmp_path, CI_MINUTES="1")
    assert code == 0 and len(made) == 5
    assert "--seconds 0 " in made[-2]
    assert any("slow tests begin in the next 0 s" in line for line in said)


def test_without_a_bound_everything_runs(tmp_path):
    _, _, made = ci(tmp_path, CI_MINUTES="0")
    assert not any("--seconds" in line or "VERSIONS" in line for line in made)
    assert [line.split()[0] for line in made[-2:]] == ["test-slow", "test-versions"]


def test_ci_fails_when_a_part_does(tmp_path):
    for part in ("setup", "lint", "test", "test-slow", "test-versions"):
        folder = tmp_path / part
        folder.mkdir()
        code, said, _ = ci(folder, fails=part)
        assert code == 1, part
        assert part == "setup" or said[-1] == "== 7 passed in 1.00s =="


class Case:
    """One of a test's, as pytest collects it."""

    path, originalname = "a file", "test_it"

    def __init__(self, *marks: pytest.MarkDecorator) -> None:
        self.marks = {mark.name: mark.mark for mark in marks}
        self.get_closest_marker = self.marks.get

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark.mark


@pytest.mark.parametrize(
    ("count", "most", "kept"), [(10, 3, [0, 3, 6]), (4, 1, [0]), (2, 5, [0, 1])]
)
def test_of_few_cases_the_others_are_slow(count, most, kept):
    cases = [Case(pytest.mark.few(most)) for _ in range(count)]
    others = [Case(), Case(pytest.mark.few(1), pytest.mark.slow)]
    leave_few_cases([others[1], *cases, others[0]])
    assert [i for i, case in enumerate(cases) if "slow" not in case.marks] == kept
    assert not others[0].marks
