"""A schedule as one HTML file that needs nothing else: zoomed, hovered over, light and dark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from weft.base.counts import counted
from weft.base.schedule import KINDS
from weft.tools.schedule.chart import Chart, Row, Totals
from weft.verify.picture.document import document

_HERE = Path(__file__).parent

# The colours of data by the rank that it comes from: the style has so many, and begins again.
COLOURS = 8

# Each rank's totals, as words.
HEAD = ("rank", "ends at", "SM rows", "SMs work", "SMs wait", "data moves", "hidden")

# What the legend calls a kind where its word alone says too little.
NAMES = {"signal": "signal’s word", "transfer": "SMs’ transfer"}

HELP = (
    "Drag to move. Ctrl and the wheel, or + and −, zoom; 0 shows all; a double click zooms to a"
    " bar. Click “SMs” for a row of each SM."
)


def page(chart: Chart, title: str, notes: Sequence[str] = ()) -> str:
    """The text of the page; `notes` are lines below its title: what was run, on what, and how the
    times came to be."""
    body = f"""{"".join(f'<p class="note">{escape(note)}</p>' for note in notes)}
<div class="tools">
<ul class="legend" aria-label="legend">{_legend(chart)}</ul>
<span class="controls"><label>signals <select id="signals"><option value="ended">that ended a wait
</option><option value="all">all</option><option value="none">none</option></select></label>
<button type="button" id="in" aria-label="zoom in">+</button>
<button type="button" id="out" aria-label="zoom out">−</button>
<button type="button" id="all">all</button></span>
</div>
<div class="chart">
<div class="corner">microseconds</div><svg id="axis" aria-hidden="true"></svg>
<div id="labels"></div>
<svg id="plot" role="img" tabindex="0" aria-labelledby="plot-title"><title id="plot-title">
{escape(_in_words(chart, title))}</title></svg>
</div>
<p class="hint">{HELP}{_left_out(chart)}</p>
<div id="tip" role="status" hidden></div>
{_table(chart.totals)}
<script type="application/json" id="data">{_data(chart)}</script>"""
    return document(title, title, body, (_HERE / "page.css", _HERE / "page.js"))


def _in_words(chart: Chart, title: str) -> str:
    ranks = counted(len(chart.totals), "rank")
    return (
        f"{title}: a schedule of {chart.end_us:.1f} microseconds on {ranks}, a row for each "
        "engine; the table below has its totals"
    )


def _left_out(chart: Chart) -> str:
    if not chart.more_arrows:
        return ""
    return f" {chart.more_arrows} signals that held nobody up are left out."


def _legend(chart: Chart) -> str:
    bars = [bar for row in chart.rows for lane in row.lanes for bar in lane.bars]
    there = {bar.kind for bar in bars if bar.about < 0}
    parts = [
        f'<li title="{escape(text)}"><i class="swatch {kind}"></i>{NAMES.get(kind, kind)}</li>'
        for kind, text in KINDS.items()
        if kind in there
    ]
    about = sorted({bar.about for bar in bars if bar.about >= 0})
    if about:
        swatches = "".join(f'<i class="swatch of{rank % COLOURS}"></i>' for rank in about)
        ranks = f"rank {about[0]}" if len(about) == 1 else f"ranks {about[0]} … {about[-1]}"
        parts.append(f'<li title="copies of it, and tiles that read it">{swatches} data of {ranks}'
                     "</li>")  # fmt: skip
    if chart.arrows:
        message = "a signal, from who sent it to who waited"
        parts.append(
            f'<li title="{message}"><i class="swatch arrow"></i>signal, to its waiter</li>'
        )
    return "".join(parts)


def cells(one: Totals) -> tuple[str, ...]:
    """One rank's totals as words, under HEAD."""
    whole = one.sms * one.end_us
    work, wait = (f"{us / whole:.0%}" if whole else "–" for us in (one.work_us, one.wait_us))
    hidden = f"{one.hidden:.0%}" if one.moved_us else "–"
    return (
        str(one.rank), f"{one.end_us:.1f} µs", str(one.sms), work, wait, f"{one.moved_us:.1f} µs",
        hidden,
    )  # fmt: skip


def _table(totals: Sequence[Totals]) -> str:
    """What a reader who sees no picture can know of it."""
    lines = [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(one)) + "</tr>"
        for one in totals
    ]
    names = "".join(f'<th scope="col">{name}</th>' for name in HEAD)
    return (
        "<table><caption>Totals of each rank: the share of the time in which its SMs work or wait;"
        " how long data moves, and how much of that is hidden behind computation</caption>"
        f"<thead><tr>{names}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _data(chart: Chart) -> str:
    """What the script draws: names are listed once, times in thousandths of a microsecond."""
    names: dict[str, int] = {}

    def name(text: str) -> int:
        return names.setdefault(text, len(names))

    values = {
        "end": _us(chart.end_us),
        "kinds": list(KINDS),
        "about": list(KINDS.values()),
        "colours": COLOURS,
        "rows": [_row(row, name) for row in chart.rows],
        "arrows": [
            [name(a.name), a.start_row, a.start_lane, _us(a.start_us), a.end_row, a.end_lane,
             _us(a.end_us), int(a.ended_wait)]
            for a in chart.arrows
        ],
    }  # fmt: skip
    values["names"] = list(names)
    # No text of a user ends the element that this stands in.
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")


def _row(row: Row, name) -> dict:
    kinds = list(KINDS)
    values: dict = {
        "rank": row.rank,
        "title": row.title,
        "lanes": [
            {
                "title": lane.title,
                "bars": [
                    [_us(bar.start_us), _us(bar.end_us), kinds.index(bar.kind), name(bar.name),
                     bar.about]
                    for bar in lane.bars
                ],
            }
            for lane in row.lanes
        ],
    }  # fmt: skip
    if row.area is not None:
        values["area"] = {
            "times": [_us(time) for time in row.area.times],
            "counts": [[round(n, 2) for n in counts] for counts in row.area.counts],
            "states": [list(state) for state in row.area.states],
            "most": row.area.most,
        }
    return values


def _us(time: float) -> float:
    return round(time, 3)
