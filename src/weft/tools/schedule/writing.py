"""A schedule as a file: a page, or a trace for Perfetto; the ending of its name says which."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from weft.base.errors import UsageError
from weft.base.schedule import Signal, Span, chrome_trace
from weft.tools import pictures
from weft.tools.schedule.chart import Chart
from weft.tools.schedule.page import page
from weft.verify.picture.document import save

PAGES, TRACES = (".html", ".htm"), (".json",)


def check_path(path: str, option: str, endings: Sequence[str] = (*PAGES, *TRACES)) -> None:
    """Refuse a file that cannot be made, before the work. An empty path asks for none.

    Raises  UsageError: as pictures.check_path; an ending that names no format
    """
    pictures.check_path(path, option)
    ending = os.path.splitext(path)[1].lower()
    if path and ending not in endings:
        known = {".html": "a page (.html)", ".json": "a trace for Perfetto (.json)"}
        there = " or ".join(text for one, text in known.items() if one in endings)
        raise UsageError(f"{option} {path}: {ending or 'no ending'} names no format; write {there}")


def write(path: str, chart: Chart, title: str, notes: Sequence[str]) -> None:
    """Raises  UsageError: the file cannot be written"""
    if is_page(path):
        save(path, page(chart, title, notes))
        return
    about = {"title": title, "notes": list(notes)}
    trace = {**chrome_trace(*_in_trace(chart)), "otherData": about}
    save(path, json.dumps(trace) + "\n")


def is_page(path: str) -> bool:
    return path.lower().endswith(PAGES)


def how_to_open(path: str) -> str:
    return "open it in a browser" if is_page(path) else "open it at https://ui.perfetto.dev"


def _in_trace(chart: Chart) -> tuple[list[Span], list[Signal]]:
    """Of signals those that ended a wait; thousands of others would hide them."""
    rows = chart.rows
    spans = [bar._replace(lane=lane.title) for row in rows for lane in row.lanes
             for bar in lane.bars]  # fmt: skip
    signals = [
        Signal(
            one.name, rows[one.start_row].rank, rows[one.start_row].lanes[one.start_lane].title,
            one.start_us, rows[one.end_row].rank, rows[one.end_row].lanes[one.end_lane].title,
            one.end_us,
        )
        for one in chart.arrows if one.ended_wait
    ]  # fmt: skip
    return spans, signals
