"""The layout of a schedule: rows in order, lanes without overlap, areas that add up, arrows."""

from __future__ import annotations

import random

import pytest

from weft.base.schedule import Signal, Span
from weft.tools.schedule import chart, chart_of
from weft.tools.schedule.chart import MAX_ARROWS, MAX_STEPS, SMS

SPANS = [
    Span(0, "sm 0", "multiply[0]", 12.0, 40.0, "program"),
    Span(0, "sm 0", "tile", 12.0, 20.0, "work"),
    Span(0, "sm 0", "wait rows[1]", 20.0, 30.0, "wait"),
    Span(0, "sm 0", "tile", 30.0, 40.0, "work"),
    Span(0, "sm 1", "multiply[1]", 12.0, 22.0, "program"),
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


def test_rows_come_by_rank_and_engine_and_time_begins_at_zero():
    made = chart_of(SPANS, SIGNALS)
    assert [(row.rank, row.title) for row in made.rows] == [
        (0, "stream main"), (0, "stream copy"), (0, "copy engine 0"), (0, SMS), (1, "stream main"),
    ]  # fmt: skip
    assert made.end_us == 30.0 and made.rows[2].lanes[0].bars[0].start_us == 0.0
    assert [lane.title for lane in made.rows[3].lanes] == ["sm 0", "sm 1"]


def test_ten_comes_after_nine():
    lanes = [Span(0, f"sm {i}", "x", 0.0, 1.0, "program") for i in (10, 2, 9)]
    (row,) = chart_of(lanes).rows
    assert [lane.title for lane in row.lanes] == ["sm 2", "sm 9", "sm 10"]


def test_the_area_counts_each_sm_once_by_what_it_does_innermost():
    area = chart_of(SPANS).rows[3].area
    assert area.most == 2 and area.states == (("work", -1), ("program", -1), ("wait", -1))
    at = dict(zip(area.times, area.counts))
    assert at == {
        2.0: (2, 0, 0), 10.0: (1, 0, 1), 12.0: (0, 0, 1), 20.0: (1, 0, 0), 30.0: (0, 0, 0),
    }  # fmt: skip


def test_a_program_that_does_neither_is_counted_too():
    spans = [Span(0, "sm 0", "p", 0.0, 9.0, "program"), Span(0, "sm 0", "w", 4.0, 6.0, "wait")]
    area = chart_of(spans).rows[0].area
    assert area.states == (("program", -1), ("wait", -1))
    assert dict(zip(area.times, area.counts)) == {
        0.0: (1, 0),
        4.0: (0, 1),
        6.0: (1, 0),
        9.0: (0, 0),
    }


def test_work_is_counted_by_whose_data_it_is_own_data_lowest():
    spans = [
        Span(rank, f"sm {i}", "tile", 10.0 * i, 10.0 * i + 10, "work", (rank + i) % 3)
        for rank in range(3) for i in range(3)
    ]  # fmt: skip
    for rank, row in enumerate(chart_of(spans).rows):
        assert [about for _, about in row.area.states] == [(rank + i) % 3 for i in range(3)]
        assert row.area.counts[0] == (1, 0, 0)


def test_what_lies_on_each_other_gets_lanes_of_its_own_and_what_a_program_holds_does_not():
    spans = [Span(0, "transfers of SMs", str(i), i, i + 2.5, "transfer") for i in range(6)]
    (row,) = chart_of(spans).rows
    assert len(row.lanes) == 3 and max(n for (n,) in row.area.counts) == 3
    for lane in row.lanes:
        ends = [bar.end_us for bar in lane.bars]
        assert all(a <= b.start_us for a, b in zip(ends, lane.bars[1:]))
    assert len(chart_of(SPANS).rows[3].lanes[0].bars) == 4


def test_arrows_join_rows_and_those_that_ended_a_wait_come_first():
    made = chart_of(SPANS, SIGNALS)
    first, second = made.arrows
    assert (first.name, first.start_row, first.end_row, first.end_lane) == ("rows[1]", 2, 3, 0)
    assert first.ended_wait and not second.ended_wait
    assert (second.name, second.start_row, second.end_us) == ("free", 4, 4.0)


def test_too_many_arrows_are_counted():
    spans = [Span(r, "stream main", "k", 0.0, 1e4, "kernel") for r in (0, 1)]
    count = MAX_ARROWS + 5
    signals = [
        Signal(str(i), 0, "stream main", i, 1, "stream main", i + 1.0) for i in range(count)
    ]  # fmt: skip
    made = chart_of(spans, signals)
    assert (len(made.arrows), made.more_arrows) == (MAX_ARROWS, 5)


def test_too_many_bars_are_joined_with_their_like(monkeypatch):
    monkeypatch.setattr(chart, "MAX_BARS", 10)
    spans = [
        Span(0, "sm 0", f"tile {i}", i, i + 1.0, "wait" if i == 6 else "work", i // 4)
        for i in range(12)
    ]
    (row,) = chart_of(spans).rows
    assert [(bar.start_us, bar.end_us, bar.name) for bar in row.lanes[0].bars] == [
        (0, 4, "tile 0 … tile 3, 4 of them"), (4, 6, "tile 4 … tile 5, 2 of them"),
        (6, 7, "tile 6"), (7, 8, "tile 7"), (8, 12, "tile 8 … tile 11, 4 of them"),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_an_area_made_coarser_holds_the_same_time(seed):
    draw = random.Random(seed)
    spans, start = [], 0.0
    for i in range(3000):
        length = draw.uniform(0.1, 2.0)
        spans.append(Span(0, f"sm {i % 7}", "x", start, start + length, "work"))
        start += draw.uniform(0.3, 2.0) if i % 7 == 6 else 0.0
    (row,) = chart_of(spans).rows
    area = row.area
    assert len(area.times) == MAX_STEPS + 1
    held = sum(
        (b - a) * sum(counts) for a, b, counts in zip(area.times, area.times[1:], area.counts)
    )
    whole = sum(
        chart.total(chart.union([(b.start_us, b.end_us) for b in lane.bars])) for lane in row.lanes
    )
    assert held == pytest.approx(whole)


def test_totals():
    one, two = chart_of(SPANS, SIGNALS).totals
    assert (one.sms, one.work_us, one.wait_us, one.moved_us) == (2, 28.0, 10.0, 20.0)
    assert one.hidden == pytest.approx(10.0 / 20.0)
    assert (two.sms, two.hidden, two.end_us) == (0, 1.0, 28.0)


def test_nothing_is_a_chart_too():
    made = chart_of([])
    assert (made.rows, made.arrows, made.totals, made.end_us) == ((), (), (), 0.0)
