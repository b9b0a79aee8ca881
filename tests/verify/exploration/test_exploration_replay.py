"""A failing execution again: with few turns, from a file, and not where its source has changed."""

from __future__ import annotations

import dataclasses
import math

import pytest
from tiny_programs import subject_of

from weft.base.errors import UsageError
from weft.verify.exploration.execution import Diverged, Execution
from weft.verify.exploration.minimise import minimised
from weft.verify.exploration.replay import Scripted, read_replay, recorded, shows, turns_of
from weft.verify.exploration.search import search

DEADLOCK = [[("set", 0, 1)], [("set", 0, 2)], [("set", 0, 3)], [("wait", 0, 2), ("wait", 0, 3)]]


def test_what_a_search_finds_runs_again():
    subject = subject_of(DEADLOCK)
    result = search(subject)
    assert result.complete and result.report.deadlocks
    found = next(f for f in result.found if f.finding.kind in ("deadlock", "unsatisfiable wait"))
    exact = turns_of(found.choices)
    ran = subject(Execution(Scripted(exact)))
    assert any(finding.key() == found.finding.key() for finding in ran.report)
    few = minimised(subject, found.choices, found.finding, seconds=math.inf)
    assert len(few) < len(found.choices) / 2
    assert shows(subject, few, found.finding) is not None
    for step in few:
        fewer = {other: turn for other, turn in few.items() if other != step}
        assert shows(subject, fewer, found.finding) is None, "each of the turns is needed"


def test_the_usual_execution_takes_no_turns():
    subject = subject_of([[("wait", 0, 1)]])
    result = search(subject)
    assert minimised(subject, result.found[0].choices, result.found[0].finding) == {}


def test_to_a_file_and_back(tmp_path):
    subject = subject_of(DEADLOCK)
    found = search(subject).found[0]
    turns = minimised(subject, found.choices, found.finding)
    file = tmp_path / "subject.py"
    file.write_text("# one")
    replay = recorded({"script": "subject.py"}, turns, found.finding, str(file))
    replay.write(str(tmp_path / "kept" / "replay.json"))
    again = read_replay(str(tmp_path / "kept" / "replay.json"))
    assert again == replay
    again.check(str(file))
    file.write_text("# two")
    with pytest.raises(UsageError, match=r"another subject\.py"):
        again.check(str(file))
    older = dataclasses.replace(again, versions={**again.versions, "triton": "3.0.0"})
    with pytest.raises(UsageError, match=r"triton \(3\.0\.0, now"):
        older.check(str(file))


def test_turns_that_do_not_fit_are_an_error_unless_lenient():
    nobody = {1: (("program", 0, 99, (0, 0, 0)), ())}
    subject = subject_of(DEADLOCK)
    with pytest.raises(Diverged, match=r"program 0\.99"):
        subject(Execution(Scripted(nobody)))
    guide = Scripted(nobody, lenient=True)
    subject(Execution(guide))
    assert guide.taken == {}


def test_the_value_that_is_seen_is_a_turn_too():
    programs = [
        [("set.relaxed", 0, 1), ("read.relaxed", 1, 0)],
        [("set.relaxed", 1, 1), ("read.relaxed", 0, 0)],
    ]
    record: list = []
    search(subject_of(programs, record=record))
    execution = next(e for outcome, _, e in record if outcome[0] == ((0,), (0,)))
    again: list = []
    choices = [(s.process, tuple(c for c, _ in s.choices)) for s in execution.trace.steps]
    assert any(any(taken) for _, taken in choices)
    subject_of(programs, record=again)(Execution(Scripted(turns_of(choices))))
    assert again[0][0][0] == ((0,), (0,))
