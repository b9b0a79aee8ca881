"""Pictures as one HTML file that needs nothing else: SVG, a little script, light and dark."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from weft.base.report import Finding, Report
from weft.verify.picture.document import document, save
from weft.verify.picture.excerpts import Excerpt, excerpts, main_file, short_place, shown_path
from weft.verify.picture.records import UNACQUIRED, Arrow, Picture, Row
from weft.verify.picture.routes import Route, routes

# Pixels.
ROW, HEAD, LEFT = 28, 44, 20
GUTTER, NARROW, TRACK = 58, 34, 10
FEW_LANES = 6
MARK, TIP = 5, 6
CORNER = 6

# A page has room for more than a terminal.
ROWS, LANES = 60, 16

HINT = "Hover over a step to see its line; click it to keep what led to it (again, or Escape: all)."

_HERE = Path(__file__).parent


def write(path: str | os.PathLike[str], pictures: Sequence[Picture], report: Report) -> None:
    """Write the page of `pictures` to `path`.

    Raises  UsageError: the file cannot be written
    """
    save(path, page(pictures, report))


def page(pictures: Sequence[Picture], report: Report) -> str:
    """The text of the page."""
    sections = "\n".join(_section(picture, at) for at, picture in enumerate(pictures))
    heading = str(report).splitlines()[0]
    parts = (_HERE / "page.css", _HERE / "page.js")
    return document(f"{report.op}: what happened", heading, sections, parts)


def _section(picture: Picture, number: int) -> str:
    finding = picture.finding
    head = "<h2>the last steps</h2>" if finding is None else _finding(finding)
    found = excerpts(picture, around=2, all_rows=True)
    lanes = "".join(f"<li><b>{lane.key}</b>{escape(str(lane))}</li>" for lane in picture.lanes)
    absent = f'\n<p class="absent">missing: {escape(picture.absent)}</p>' if picture.absent else ""
    if any(arrow.kind == "value" for arrow in picture.arrows):
        absent += f'\n<p class="hint">dotted: {UNACQUIRED}</p>'
    elsewhere = "".join(f'\n<p class="elsewhere">{escape(line)}</p>' for line in picture.elsewhere)
    if elsewhere:
        elsewhere = f"\n<h3>elsewhere, at the end</h3>{elsewhere}"
    return f"""<section class="picture" id="picture-{number}">
{head}
<div class="columns">
<div>
<ul class="lanes">{lanes}</ul>
<div class="diagram">
{_svg(picture)}
{_rows(picture, found)}
</div>
<p class="hint">{picture.shown} of {picture.total} steps are shown.</p>
<pre class="detail">{HINT}</pre>{absent}{elsewhere}
</div>
<div class="source">
{"".join(_source(excerpt, at) for at, excerpt in enumerate(found))}</div>
</div>
</section>"""


def _finding(finding: Finding) -> str:
    """What is wrong, in a line; a table that follows it (who waits for what) is folded away."""
    first, _, rest = finding.message.partition("\n")
    text = f'<h2>{escape(finding.kind)}</h2>\n<p class="message">{escape(first)}</p>'
    if rest:
        text += f"\n<details><summary>in words</summary><pre>{escape(rest)}</pre></details>"
    if finding.remedy:
        text += f'\n<p class="remedy">remedy: {escape(finding.remedy)}</p>'
    return text


def _rows(picture: Picture, found: Sequence[Excerpt]) -> str:
    files = {excerpt.file: at for at, excerpt in enumerate(found)}
    lines = [_row_line(picture, row, at, files) for at, row in enumerate(picture.rows)]
    return f'<ol class="rows" style="padding-top: {HEAD}px">\n' + "\n".join(lines) + "\n</ol>"


def _row_line(picture: Picture, row: Row, at: int, files: dict[str, int]) -> str:
    lane = picture.lanes[row.lane]
    frame, place = row.place.outermost, short_place(row.place, main_file(picture))
    line = "" if frame is None else f"{files.get(frame.file, '')}:{frame.line}"
    steps = ", ".join(map(str, row.steps))
    detail = f"step {steps}, {lane}\n{row.text}\nat {row.place}"
    return (
        f'<li class="row {row.mark}" style="height: {ROW}px" tabindex="0" data-row="{at}"'
        f' data-lane="{row.lane}" data-line="{line}" data-detail="{escape(detail)}">'
        f'<span class="step">{row.step}</span><b>{lane.key}</b>'
        f'<span class="text">{escape(row.text)}</span>'
        f'<span class="place">{escape(place)}</span></li>'
    )


def _source(excerpt: Excerpt, number: int) -> str:
    parts = []
    for part in excerpt.parts:
        lines = []
        for line in part:
            telling = " telling" if line.telling else ""
            code = line.text.lstrip()
            indent = line.text[: len(line.text) - len(code)]
            lines.append(
                f'<div class="line{telling}" data-line="{number}:{line.number}">'
                f"<i>{line.number}</i><code>{indent}<u>{escape(code)}</u></code></div>"
            )
            if line.telling:
                lines += [f'<div class="note">{escape(note)}</div>' for note in line.notes]
        parts.append("\n".join(lines))
    body = '\n<div class="cut">⋮</div>\n'.join(parts)
    return f"<h3>{escape(shown_path(excerpt.file))}</h3>\n{body}\n"


# ---------------------------------------------------------------------------------------------


def _svg(picture: Picture) -> str:
    paths, tracks = routes(picture)
    xs = _columns(tracks)
    width, height = xs[-1], HEAD + ROW * len(picture.rows)
    parts = [*_heads(picture, xs, height)]
    for at, lane in enumerate(picture.lanes):
        parts.append(
            f'<line class="life" x1="{xs[at]}" x2="{xs[at]}" y1="{_y(lane.first)}"'
            f' y2="{_y(lane.last)}"/>'
        )
    parts += [_arrow(picture, xs, paths[arrow], arrow) for arrow in picture.arrows]
    parts += [_mark(xs[row.lane], at, row) for at, row in enumerate(picture.rows)]
    name = "steps" if picture.finding is None else picture.finding.kind
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="space-time picture: {escape(name)}">\n' + "\n".join(parts) + "\n</svg>"
    )


def _columns(tracks: Sequence[int]) -> list[int]:
    """The x of each lane, and last the width of all."""
    least = GUTTER if len(tracks) - 1 <= FEW_LANES else NARROW
    xs, x = [], LEFT
    for at, count in enumerate(tracks):
        if at == len(tracks) - 1 and not count:
            least = LEFT
        x += max(least, (2 * (MARK + TIP + 4) + TRACK * (count - 1)) if count else 0) if at else 0
        xs.append(x)
    return xs


def _y(row: int) -> int:
    return HEAD + ROW * row + ROW // 2


def _heads(picture: Picture, xs: Sequence[int], height: int) -> list[str]:
    """A band for each rank with its number, and the letter of each lane."""
    parts = []
    for rank in dict.fromkeys(lane.rank for lane in picture.lanes):
        mine = [x for x, lane in zip(xs, picture.lanes) if lane.rank == rank]
        x, width = mine[0] - 13, mine[-1] - mine[0] + 26
        parts.append(
            f'<rect class="band" x="{x}" y="2" width="{width}" height="{height - 4}" rx="6"/>'
            f'<text class="rank" x="{x + width / 2}" y="17" text-anchor="middle">r{rank}</text>'
        )
    for x, lane in zip(xs, picture.lanes):
        parts.append(
            f'<text class="lane" x="{x}" y="37" text-anchor="middle">{lane.key}'
            f"<title>{escape(str(lane))}</title></text>"
        )
    return parts


def _mark(x: int, at: int, row: Row) -> str:
    """A circle; a square where somebody is stuck, a diamond where the finding is."""
    y = _y(at)
    outline = f"M{x - 5},{y}a5,5 0 1,0 10,0a5,5 0 1,0 -10,0z"
    if row.mark == "stuck":
        outline = f"M{x - 6},{y - 6}h12v12h-12z"
    elif row.mark in ("earlier", "later", "finding"):
        outline = f"M{x},{y - 8}l8,8l-8,8l-8,-8z"
    title = f"<title>{escape(row.text)}</title>"
    return f'<path class="mark {row.mark}" d="{outline}" data-row="{at}">{title}</path>'


def _arrow(picture: Picture, xs: Sequence[int], route: Route, arrow: Arrow) -> str:
    """Across, down its track and in, with round corners."""
    start, end = picture.rows[arrow.start].lane, picture.rows[arrow.end].lane
    x0, y0, x1, y1 = xs[start], _y(arrow.start), xs[end], _y(arrow.end)
    track = xs[route.gutter - 1] + MARK + TIP + 4 + TRACK * route.track
    out = 1 if track > x0 else -1
    into = 1 if x1 > track else -1
    tip = x1 - into * (MARK + 3)
    path = (
        f"M{x0 + out * (MARK + 1)},{y0}H{track - out * CORNER}Q{track},{y0} {track},{y0 + CORNER}"
        f"V{y1 - CORNER}Q{track},{y1} {track + into * CORNER},{y1}H{tip}"
    )
    back = tip - into * TIP
    return (
        f'<path class="arrow {arrow.kind}" d="{path}" data-start="{arrow.start}"'
        f' data-end="{arrow.end}"/>'
        f'<path class="head {arrow.kind}" d="M{tip},{y1}L{back},{y1 - 4}V{y1 + 4}z"/>'
    )
