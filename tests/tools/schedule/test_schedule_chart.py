"""The layout of a schedule: lanes without overlap, signals, totals, its file."""

from __future__ import annotations

import json

import pytest

from weft.base.errors import UsageError
from weft.base.schedule import LINKS, Signal, Span
from weft.tools.schedule.chart import SMS, chart_of, engine_of, write

SPANS = [
    Span(0, "sm 0", "tile", 12.0, 20.0, "work"),
    Span(0, "sm 0", "wait rows[1]", 20.0, 30.0, "wait"),
    Span(0, "sm 0", "tile", 30.0, 40.0, "work"),
    Span(0, "sm 1", "tile", 12.0, 22.0, "work"),
    Span(0, "copy engine 0", "rows of rank 1", 10.0, 30.0, "copy", 1),
    Span(0, "stream main", "multiply", 12.0, 40.0, "kernel"),
    Span(0, "stream copy", "wait for stream main", 10.0, 11.0, "wait"),
    Span(1, "stream main", "multiply", 13.0, 38.0, "kernel"),
]
SIGNALS = [
    Signal("rows[1]", 0, "copy engine 0", 30.0, 0, "sm 0", 30.0),
    Signal("rows[1]", 0, "copy engine 0", 30.0, 0, "sm 1", 30.0),
    Signal("free", 1, "stream main", 13.0, 0, "sm 0", 14.0),
    Signal("free", 1, "nowhere", 13.0, 0, "sm 0", 14.0),
]


def test_lanes_come_by_rank_and_engine_and_time_begins_at_zero():
    made = chart_of(SPANS, SIGNALS)
    lanes = dict.fromkeys((bar.rank, bar.lane) for bar in made.spans)
    assert list(lanes) == [
        (0, "stream main"), (0, "stream copy"), (0, "copy engine 0"), (0, "sm 0"), (0, "sm 1"),
        (1, "stream main"),
    ]  # fmt: skip
    assert [engine_of(lane) for _, lane in lanes][2:5] == ["copy engine 0", SMS, SMS]
    assert made.end_us == 30.0 and made.spans[2].start_us == 0.0


def test_ten_comes_after_nine():
    lanes = [Span(0, f"sm {i}", "x", 0.0, 1.0) for i in (10, 2, 9)]
    assert [bar.lane for bar in chart_of(lanes).spans] == ["sm 2", "sm 9", "sm 10"]


def test_what_lies_on_each_other_gets_lanes_of_its_own():
    spans = [Span(0, LINKS, str(i), i, i + 2.5, "transfer") for i in range(6)]
    made = chart_of(spans)
    lanes = {bar.lane: [one for one in made.spans if one.lane == bar.lane] for bar in made.spans}
    assert list(lanes) == [LINKS, f"{LINKS} (2)", f"{LINKS} (3)"]
    assert {engine_of(lane) for lane in lanes} == {LINKS}
    for bars in lanes.values():
        assert all(a.end_us <= b.start_us for a, b in zip(bars, bars[1:]))
    assert len([bar for bar in chart_of(SPANS).spans if bar.lane == "sm 0"]) == 3


def test_signals_that_ended_a_wait_are_kept_and_others_left_out():
    (kept,) = chart_of(SPANS, SIGNALS).signals
    assert (kept.name, kept.lane, kept.sent_us, kept.arrived_us) == ("rows[1]", "sm 0", 20.0, 20.0)


def test_what_two_consumers_of_a_program_do_at_once_counts_once():
    both = [Span(0, "sm 0", "tile", start, start + 4.0, "work") for start in (0.0, 2.0)]
    (one,) = chart_of(both).totals
    assert (one.sms, one.work_us) == (1, 6.0) and one.as_words()[3] == "100%"


def test_the_file_holds_every_bar_on_its_lane(tmp_path):
    path = tmp_path / "x.json"
    write(str(path), chart_of(SPANS, SIGNALS), "two ranks", ["m=3"])
    trace = json.loads(path.read_text())
    assert trace["otherData"] == {"title": "two ranks", "notes": ["m=3"]}
    assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) == len(SPANS)
    with pytest.raises(UsageError, match="No such file"):
        write(str(tmp_path / "none" / "x.json"), chart_of(SPANS), "", [])


def test_totals():
    one, two = chart_of(SPANS, SIGNALS).totals
    assert (one.sms, one.work_us, one.wait_us, one.moved_us) == (2, 28.0, 10.0, 20.0)
    assert one.hidden == pytest.approx(10.0 / 20.0)
    assert (two.sms, two.hidden, two.end_us) == (0, 1.0, 28.0)


def test_nothing_is_a_chart_too():
    made = chart_of([])
    assert (made.spans, made.signals, made.totals, made.end_us) == ((), (), (), 0.0)
