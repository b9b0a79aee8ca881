"""What docs/timeline.md shows: the predicted schedule of a call, its rows as lines of text."""

from __future__ import annotations

from itertools import groupby

from generate.blocks import code

from weft.tools import options
from weft.tools.explain import subject_of
from weft.tools.schedule.chart import chart_of, engine_of

COLUMNS = 64
CALL = {"ranks": 3, "nodes": "1", "shape": "m=3072,n=7168,k=4096", "dtype": "bf16"}


def picture() -> str:
    """Each row of the chart over time: the rank whose data it is, or = where it is nobody's."""
    subject = subject_of(options.work_of("ag_gemm", **CALL), "cuda:90", "h200x4")
    found = subject.schedule
    chart = chart_of(found.spans, found.signals)
    lines, rank = [], -1
    for (of, engine), bars in groupby(chart.spans, key=lambda s: (s.rank, engine_of(s.lane))):
        line = [" "] * COLUMNS
        for bar in bars:
            start, end = (int(us / chart.end_us * COLUMNS) for us in (bar.start_us, bar.end_us))
            mark = "." if bar.kind == "wait" else "=" if bar.about < 0 else str(bar.about)
            line[start : max(end, start + 1)] = mark * (max(end, start + 1) - start)
        head = f"rank {of}" if of != rank else ""
        lines.append(f"{head:<7} {engine:<17} |{''.join(line)[:COLUMNS]}|")
        rank = of
    return code("\n".join([*lines, f"{'0':>27}{f'{chart.end_us:.0f} us':>{COLUMNS}}"]), "")
