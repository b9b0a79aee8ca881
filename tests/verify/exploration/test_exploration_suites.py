"""The programs of wrong/ and right/, explored: each fault is found, and nothing where none is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weft.verify.exploration.search import Bounds, Ran, Search, outcome_bytes, search

sys.path.insert(0, str(Path(__file__).parents[1]))
from programs import load, programs, run

BOUNDS = Bounds(executions=40, seconds=3.0)


def explored(program) -> Search:
    results: list = []

    def subject(execution) -> Ran:
        outcome = run(program, 0, chooser=execution)
        results.append([type(error).__name__ for error in outcome.errors])
        return Ran(outcome.report, None)

    result = search(subject, BOUNDS)
    result.outcomes = {outcome_bytes(r): [] for r in results if r}
    return result


@pytest.mark.slow
@pytest.mark.parametrize("path", programs("wrong"), ids=lambda path: path.stem)
def test_every_fault_is_found(path: Path):
    program = load(path)
    result = explored(program)
    expected = getattr(program, "FOUND", None)
    if expected is None:
        assert result.outcomes, "the host is told"
    elif expected != "nondeterministic result":  # which the runner of the suite compares for
        assert expected in {finding.kind for finding in result.report}


@pytest.mark.slow
@pytest.mark.parametrize("path", programs("right"), ids=lambda path: path.stem)
def test_no_false_alarm(path: Path):
    result = explored(load(path))
    assert result.report.ok and not result.outcomes, result.report
    assert result.executions > 0
