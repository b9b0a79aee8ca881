"""An example without one of its lines: the remedy that is named is the line that is missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mending import BUG, ROOT

from weft.base.report import Report
from weft.emulator.script import run_script

NODES = {"10_two_nodes.py": (2, 2)}

# What is left out by what its remedy must say.
MISSING = {
    "wait": "signal (release) after the write and wait for it (acquire) before the read",
    "signal": "signal once more, to this rank and word",
    "credit": "before a buffer is used again, wait for a credit of each of its readers",
}
KINDS = {
    "barrier": "wait", "wait": "wait", "notify": "signal", "put_signal": "signal",
    "slot_finish": "credit", "slot_wait_free": "credit",
}  # fmt: skip
# By file and line: what is missing there instead, or a remedy of its own.
OTHERS = {
    ("04_barrier.py", "wl.barrier(world, i)  # every rank has read"): "credit",
    # The first shot says that all ranks have begun: nothing but the words is missed.
    ("07_all_reduce.py", "wl.slot_wait_free"): "wait for it where its data is used",
    # The own signal is for the same words, and comes behind the wait.
    ("10_two_nodes.py", "wl.put_signal"): "signal before that wait",
}


def calls_of(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    """The statements that order something, and what they are."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = getattr(node.value.func, "attr", "")
            if name in KINDS:
                yield node, KINDS[name]


def cases() -> Iterator[Any]:
    for path in sorted((ROOT / "examples").glob("[0-9]*.py")):
        lines = path.read_text().splitlines()
        for statement, kind in calls_of(path):
            text = lines[statement.lineno - 1].strip()
            asked = next(
                (other for (name, start), other in OTHERS.items()
                 if name == path.name and text.startswith(start)), kind
            )  # fmt: skip
            name = f"{path.name}:{statement.lineno}"
            yield pytest.param(path, statement, MISSING.get(asked, asked), id=name)


def without(path: Path, statement: ast.stmt, folder: Path) -> Path:
    """A copy of the example in which `pass` stands for one statement."""
    lines = path.read_text().splitlines()
    first, end = statement.lineno - 1, statement.end_lineno or statement.lineno
    lines[first:end] = [" " * statement.col_offset + "pass", *[""] * (end - first - 1)]
    copy = folder / path.name
    copy.write_text("\n".join(lines) + "\n")
    return copy


def run(path: Path, seed: int = 0) -> Report:
    return run_script(str(path), ranks=4, nodes=NODES.get(path.name, 1), seed=seed)


@pytest.mark.few(3)
@pytest.mark.parametrize(("path", "statement", "remedy"), list(cases()))
def test_the_remedy_is_the_line_that_is_missing(path, statement, remedy, tmp_path):
    report = run(without(path, statement, tmp_path))
    first, *_ = (one for one in report if one.kind not in ("error", "uninitialised"))
    assert first.remedy.startswith(remedy), str(report)


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(8))
def test_a_forgotten_wait_is_asked_for_under_every_schedule(seed, tmp_path):
    path = ROOT / "examples" / "06_all_gather.py"
    (statement,) = (one for one, kind in calls_of(path) if kind == "wait")
    report = run(without(path, statement, tmp_path), seed)
    races = [race for race in report.races if "gathered" in str(race.first.tensor)]
    assert races, str(report)
    for race in races:
        assert race.remedy.startswith(MISSING["wait"]), str(race)


@pytest.mark.parametrize("seed", range(8))
def test_the_tutorials_bug_asks_for_a_credit_under_every_schedule(seed):
    (race,) = run(ROOT / "examples" / BUG, seed).races
    credit = "signal (release) after the read and wait for it (acquire) before the write"
    assert race.remedy.startswith((MISSING["credit"], credit)), str(race)
