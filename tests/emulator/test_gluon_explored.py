"""Kernels with shared memory under every schedule: few are enough, and what is wrong is found."""

from __future__ import annotations

import math

import pytest
import torch
from gluon_kernels import (
    descriptor,
    line,
    pipelined_copy,
    pipelined_gemm,
    rounds_of_a_pair,
    sides,
    specialised_copy,
    specialised_gemm,
)

import weft
from weft.verify.exploration.execution import Execution
from weft.verify.exploration.minimise import minimised
from weft.verify.exploration.replay import Scripted
from weft.verify.exploration.search import Bounds, Ran, outcome_bytes, search

BOUNDS = Bounds(executions=300, seconds=math.inf)


def subject_of(main, reports=None):
    """`main` on one rank, as something to explore; `reports` are given those of all executions."""

    def subject(execution) -> Ran:
        with weft.emulated(ranks=1, chooser=execution, collect=True) as ranks:
            ranks.run(main)
        if reports is not None:
            reports.append(ranks.report)
        return Ran(ranks.report, outcome_bytes(ranks.results))

    return subject


def pair(fault="", rounds=3):
    def main():
        out = torch.zeros(rounds, 128, dtype=torch.int32)
        rounds_of_a_pair[(1,)](out, rounds, fault)
        return out

    return main


def piped(fault="", stages=2, tiles=3):
    def main():
        x = torch.arange(16.0 * tiles * 24).reshape(-1, 24).half()
        out = torch.zeros_like(x)
        source, target = descriptor(x, (16, 32)), descriptor(out, (16, 32))
        pipelined_copy[(1,)](source, target, tiles, stages, fault)
        return out

    return main


def copied(fault="", stages=2, tiles=3):
    def main():
        x = torch.arange(16.0 * tiles * 24).reshape(-1, 24).half()
        out = torch.zeros_like(x)
        specialised_copy[(1,)](descriptor(x, (16, 32)), out, tiles, 24, stages, fault)
        return out

    return main


def multiplied(kernel, fault="", stages=()):
    def main():
        a, b = torch.ones(64, 72).half(), torch.ones(72, 16).half()
        c = torch.zeros(64, 16).half()
        blocks = descriptor(a, (64, 16)), descriptor(b, (16, 16)), descriptor(c, (64, 16))
        kernel[(1,)](*blocks, 72, *stages, fault)
        return c

    return main


RIGHT = {
    "a pair": pair(),
    "a pipelined copy": piped(),
    "more stages than tiles": piped(stages=4, tiles=3),
    "a producer and a consumer": copied(),
    "a pipelined product": multiplied(pipelined_gemm),
    "a specialised product": multiplied(specialised_gemm, stages=(2,)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_one_execution_stands_for_all(name):
    """In whatever order loads arrive and partitions step: their barriers order all that shows."""
    result = search(subject_of(RIGHT[name]), BOUNDS, deterministic=True)
    assert result.complete and result.report.ok, str(result.report)
    assert (result.executions, len(result.outcomes)) == (1, 1)


# What is shown by every execution: the kind, and the lines.
WRONG = {
    "a credit before the tile is read": (
        copied("credit before"), "race", {"partitions: loads", "partitions: reads"}),
    "no credit": (copied("no credit"), "deadlock", {"partitions: waits for room"}),
    "a barrier that expects nobody": (
        copied("no expect"), "deadlock", {"partitions: waits for tiles"}),
    "a stage that a product still reads": (
        multiplied(specialised_gemm, "own credit", (2,)), "race",
        {"mma: loads a", "mma: multiplies"}),
    "no fence": (piped("fence"), "race", {"copy: writes", "copy: stores"}),
    "bytes that nobody loads": (piped("bytes"), "deadlock", {"copy: waits"}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_shows_under_every_schedule(name):
    main, kind, lines = WRONG[name]
    reports = []
    result = search(subject_of(main, reports), BOUNDS)
    assert result.complete
    wanted = {line(one) for one in lines}
    for report in reports:
        assert wanted in [sides(one) for one in report if one.kind == kind], str(report)


def test_a_wait_that_is_left_out():
    """Wherever the reader comes in between, something shows; the race, where it comes behind."""
    reports = []
    result = search(subject_of(pair("no wait"), reports), BOUNDS)
    assert result.complete and result.executions > 1
    assert not any(report.ok for report in reports)
    assert {line("rounds: writes"), line("rounds: reads")} in map(sides, result.report.races)


def test_a_round_that_is_missed_deadlocks_under_some_schedules():
    """Two rounds are announced without an answer: who waits for the first one in between goes on,
    who comes later sees the second one's parity, and waits for ever."""
    reports = []
    result = search(subject_of(pair("no answer", rounds=2), reports), BOUNDS)
    assert result.complete and result.executions > 1
    stuck = [report for report in reports if report.deadlocks]
    assert 0 < len(stuck) < len(reports)
    waits = {line("rounds: waits for the round")}
    assert all(waits in map(sides, report.deadlocks) for report in stuck)
    # Who has not missed it reads what is written again meanwhile.
    assert {line("rounds: writes"), line("rounds: reads")} in map(sides, result.report.races)
    assert not any(report.ok for report in reports)


def test_a_wrong_parity_under_every_schedule():
    """Loads that nobody waits for arrive in any order with the waits for others."""
    result = search(subject_of(piped("parity")), BOUNDS)
    assert result.complete and result.executions > 1
    kinds = {finding.kind for finding in result.report}
    assert {"race", "deadlock"} <= kinds
    assert {line("copy: reads"), line("copy: first loads")} in map(sides, result.report.races)


def test_an_execution_is_run_again_by_its_choices():
    subject = subject_of(pair("no answer", rounds=2))
    result = search(subject, BOUNDS)
    found = next(one for one in result.found if one.finding.kind == "deadlock")
    turns = minimised(subject, found.choices, found.finding, seconds=math.inf)
    again = subject(Execution(Scripted(turns))).report
    assert found.finding.key() in {finding.key() for finding in again}
