"""Findings and reports: JSON's shape, the words of the verdict, one defect filed once."""

import json

import pytest

from weft.base.place import Frame, Place
from weft.base.report import Finding, Report, Side


def _race(line=7, index=3):
    return Finding(
        "race",
        "two writes that nothing orders",
        Side.at(Place((Frame("a.py", line, "push"),)), rank=0, kernel="push", program=(1, 0, 0),
                tensor="out", index=index, note="stores"),
        Side(rank=1, kernel="push", file="a.py", line=9, tensor="out", index=index),
        remedy="wait before the store",
    )  # fmt: skip


def test_json_has_the_shape_that_others_rely_on():
    report = Report("ag_gemm", ranks=4, schedules=50)
    report.add(_race())
    values = json.loads(json.dumps(report.to_json()))
    assert list(values) == [
        "op",
        "ranks",
        "schedules",
        "complete",
        "races",
        "deadlocks",
        "ok",
    ]
    assert values["ok"] is False and values["complete"] is False
    finding = values["races"][0]
    assert set(finding) == {"kind", "message", "first", "second", "remedy"}
    assert finding["first"] == {
        "rank": 0, "kernel": "push", "program": [1, 0, 0], "file": "a.py", "line": 7,
        "tensor": "out", "index": 3,
    }  # fmt: skip


def test_one_defect_is_filed_once_whatever_the_index():
    report = Report("x", ranks=2)
    assert report.add(_race(index=3))
    assert not report.add(_race(index=4))
    assert report.add(_race(line=8))
    assert len(report.races) == 2


def test_kinds_go_to_their_lists_and_clean_means_ok():
    report = Report("x", ranks=2, complete=True)
    assert report.ok and "nothing found" in str(report) and "complete" in str(report)
    report.add(Finding("deadlock", "all wait", Side(rank=0)))
    report.add(Finding("out of bounds", "index 9 of 8", Side(rank=0)))
    assert len(report.deadlocks) == len(report.others) == 1
    assert not report.ok and "others" in report.to_json()
    assert str(report).splitlines()[0].endswith("1 deadlock, 1 other finding (out of bounds)")
    assert [one.kind for one in report] == ["out of bounds", "deadlock"], "the cause is told first"


def test_text_names_line_and_remedy():
    text = str(_race())
    assert "a.py:7 in push" in text and "remedy: wait before the store" in text
    assert "out[3]" in text and "program 1, 0, 0" in text


def test_merge_adds_schedules_and_keeps_complete_only_where_both_say_so():
    total = Report("x", ranks=2, schedules=3, complete=True)
    other = Report("x", ranks=2, schedules=2)
    other.add(_race())
    total.merge(other)
    assert total.schedules == 5 and not total.complete and len(total.races) == 1


@pytest.mark.parametrize("many, head", [
    (1, "x on 1 rank (1 schedule, not all): 1 race, 1 other finding (misuse)"),
    (2, "x on 2 ranks (2 schedules, not all): 2 races, 2 other findings (misuse)"),
])  # fmt: skip
def test_one_of_a_kind_is_told_as_one(many, head):
    report = Report("x", many, many)
    for line in range(many):
        report.add(_race(line))
        report.add(Finding("misuse", "", Side(rank=0, kernel="push", file="a.py", line=line)))
    assert str(report).splitlines()[0] == head
