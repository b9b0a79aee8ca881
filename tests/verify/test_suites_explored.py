"""The suites under exploration: what is wrong is found, what is right stays clean, in few runs."""

from __future__ import annotations

import math

import pytest
from programs import load, marked_line, names, programs, run

from weft.verify.exploration.search import Bounds, Ran, Search, outcome_bytes, search

BOUNDS = Bounds(executions=30, seconds=math.inf)

pytestmark = pytest.mark.slow


def explored(program) -> Search:
    def subject(execution) -> Ran:
        outcome = run(program, 0, chooser=execution)
        if outcome.errors:
            raise outcome.errors[0]
        return Ran(outcome.report, outcome_bytes(outcome.results))

    return search(subject, BOUNDS, deterministic=getattr(program, "DETERMINISTIC", False))


@pytest.mark.parametrize("path", programs("wrong"), ids=lambda path: path.stem)
def test_found(path):
    program, line = load(path), marked_line(path)
    if hasattr(program, "RAISES"):
        pytest.skip("raised by a host, whatever the schedule")
    report = explored(program).report
    found = [finding for finding in report if finding.kind == program.FOUND]
    assert any(names(finding, path, line) for finding in found), str(report)


@pytest.mark.parametrize("path", programs("right"), ids=lambda path: path.stem)
def test_silent(path):
    result = explored(load(path))
    assert result.report.ok, str(result.report)
    assert not result.bound or result.executions == BOUNDS.executions
