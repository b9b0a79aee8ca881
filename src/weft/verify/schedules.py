"""Run a program under many schedules and gather what any of them shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.base.errors import UsageError
from weft.base.report import Finding, Report

Found = Callable[[int, Finding], None]


def explore(
    run: Callable[[int], Report],
    seeds: Iterable[int],
    *,
    on_new: Found | None = None,
    on_schedule: Callable[[int], None] | None = None,
) -> Report:
    """One report of `run(seed)` for every seed: the same defect seen twice is one finding.

    `on_new(seed, finding)` hears of each new finding: `run(seed)` shows it again.
    Seeds sample the schedules, so the report never calls itself complete.

    Raises  UsageError: no seed at all
    """
    total: Report | None = None
    for seed in seeds:
        report = run(seed)
        if total is None:
            total = Report(report.op, report.ranks, schedules=0)
        for finding in report:
            if total.add(finding) and on_new is not None:
                on_new(seed, finding)
        total.schedules += report.schedules
        total.launches += report.launches
        if on_schedule is not None:
            on_schedule(seed)
    if total is None:
        raise UsageError("explore: no seeds; give at least one schedule")
    return total
