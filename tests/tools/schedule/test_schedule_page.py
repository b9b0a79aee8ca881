"""A schedule's page: one file that needs nothing else, and what a reader can do with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser import in_chromium, look, stands_alone

from weft.base.schedule import Signal, Span
from weft.tools.schedule import chart_of, page

RANKS, SM_COUNT = 3, 12


def schedule():
    """Three ranks: an engine brings two peers' rows, SMs multiply own tiles, wait, go on."""
    spans, signals = [], []
    for rank in range(RANKS):
        spans.append(Span(rank, "stream main", "multiply</script>", 2.0, 40.0, "kernel"))
        for hop in (1, 2):
            end, source = 15.0 * hop, (rank + hop) % RANKS
            spans.append(Span(rank, "copy engine 0", f"rows of rank {source}", end - 13.0, end,
                              "copy", source))  # fmt: skip
        for sm in range(SM_COUNT):
            lane = f"sm {sm}"
            spans.append(Span(rank, lane, f"multiply[{sm}]", 2.0, 40.0, "program"))
            for hop, start in enumerate((2.0, 15.0, 30.0)):
                spans.append(Span(rank, lane, f"tile {sm} of hop {hop}", start, start + 10.0,
                                  "work", (rank + hop) % RANKS))  # fmt: skip
                if hop:
                    begin = 10.0 * hop + 2.0 if hop == 1 else 25.0
                    spans.append(Span(rank, lane, f"wait rows[{hop}]", begin, start, "wait"))
                    signals.append(Signal(f"rows[{hop}]", rank, "copy engine 0", start, rank, lane,
                                          start))  # fmt: skip
        signals.append(
            Signal("taken", rank, "copy engine 0", 30.0, (rank + 1) % RANKS, "stream main", 31.0)
        )
    return chart_of(spans, signals)


def text():
    return page(schedule(), "ag_gemm & <others>", ["m=<1>", "& so on"])


def test_the_page_needs_nothing_else_and_what_others_wrote_is_text():
    markup = stands_alone(text())
    assert "ag_gemm & <others>" not in text() and "m=&lt;1&gt;" in text()
    assert text().count("</script>") == 2 == [tag for tag, _ in markup.tags].count("script")
    rows = [attrs for tag, attrs in markup.tags if tag == "td"]
    assert len(rows) == 7 * RANKS


def test_the_data_is_the_chart():
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text())
    data = json.loads(found)
    chart = schedule()
    assert [row["title"] for row in data["rows"]] == [row.title for row in chart.rows]
    assert len(data["arrows"]) == len(chart.arrows) == 3 * RANKS
    start, end, kind, name, about = data["rows"][1]["lanes"][0]["bars"][0]
    assert (start, end, data["kinds"][kind]) == (0.0, 13.0, "copy")
    assert (data["names"][name], about) == ("rows of rank 1", 1)
    assert data["end"] == chart.end_us == 38.0


def test_the_legend_says_what_is_there_and_no_more():
    legend = text().split('aria-label="legend">')[1].split("</ul>")[0]
    assert re.findall(r"</i> ?([^<]+)</li>", legend) == [
        "kernel", "program", "wait", "data of ranks 0 … 2", "signal, to its waiter",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def looked(tmp_path_factory):
    script = Path(__file__).with_name("look_schedule.js")
    return look(text(), script, tmp_path_factory.mktemp("schedule"))


@in_chromium
def test_the_script_runs_without_a_complaint(looked):
    assert looked[0]["errors"] == [] and "CONSOLE" not in looked[1], looked[1]


@in_chromium
def test_everything_is_drawn_beside_its_label(looked):
    first = looked[0]["first"]
    assert first["bars"] == 3 * RANKS and first["areas"] == (2 + RANKS) * RANKS
    assert first["arrows"] == 2 * RANKS
    assert first["clash"] == 0 and looked[0]["beside"] < 2
    assert looked[0]["name"].startswith("ag_gemm & <others>: a schedule of 38.0 microseconds on 3")


@in_chromium
def test_hovering_says_what_when_and_how_long(looked):
    answer = looked[0]
    assert answer["tip"].startswith("rows of rank 1\n0.00 to 13.0 µs: 13.0 µs\ndata of rank 1\n")
    assert "rank 0, copy engine 0 · copy: a copy engine moves bytes" in answer["tip"]
    assert answer["tip_shown"] and answer["tip_gone"] and answer["lit"] == 1
    assert re.match(r"rank 0, [\d.]+ µs: of 12 SMs\n12 (work|wait)", answer["area_tip"])


@in_chromium
def test_sms_open_into_a_row_each_and_close(looked):
    first, opened, closed = (looked[0][name] for name in ("first", "opened", "closed"))
    assert (opened["expanded"], opened["lanes"], opened["clash"]) == ("true", SM_COUNT, 0)
    assert opened["bars"] == first["bars"] + 6 * SM_COUNT and closed == first


@in_chromium
def test_zooming_and_moving(looked):
    answer = looked[0]
    whole = answer["first"]["to"] - answer["first"]["from"]
    zoomed, panned = answer["zoomed"], answer["panned"]
    length = zoomed["to"] - zoomed["from"]
    assert length == pytest.approx(0.6 * whole) and zoomed["outside"] == 0
    assert panned["from"] - zoomed["from"] == pytest.approx(0.2 * length)
    assert answer["closest"]["to"] - answer["closest"]["from"] == pytest.approx(0.05)
    assert answer["again"] == answer["first"]
    around = 13.0 * 0.3
    assert answer["on_bar"]["from"] == 0.0
    assert answer["on_bar"]["to"] == pytest.approx(13.0 + 2 * around)


@in_chromium
def test_signals_can_be_left_out_or_all_shown(looked):
    assert (looked[0]["no_arrows"], looked[0]["all_arrows"]) == (0, 3 * RANKS)


@in_chromium
def test_light_and_dark(looked):
    light, dark = looked[0]["papers"]
    assert light != dark
