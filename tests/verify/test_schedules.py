"""Exploration by seeds: one report of many runs."""

from __future__ import annotations

import pytest

import weft
from weft.base.report import Finding, Report, Side
from weft.verify.schedules import explore


def finding(kind: str, line: int) -> Finding:
    return Finding(kind, "made up", Side(file="kernel.py", line=line))


def run(seed: int) -> Report:
    report = Report("op", 2)
    if seed >= 2:
        report.add(finding("race", 7))
    if seed == 4:
        report.add(finding("deadlock", 9))
    return report


def test_the_same_defect_is_one_finding_and_its_first_seed_is_told():
    new: list[tuple[int, str]] = []
    done: list[int] = []
    report = explore(
        run,
        range(6),
        on_new=lambda seed, found: new.append((seed, found.kind)),
        on_schedule=done.append,
    )
    assert (len(report.races), len(report.deadlocks)) == (1, 1)
    assert new == [(2, "race"), (4, "deadlock")]
    assert report.schedules == 6 and done == list(range(6))
    assert not report.ok and not report.complete


def test_no_schedule_is_no_verdict():
    with pytest.raises(weft.UsageError, match="no seeds"):
        explore(run, [])
