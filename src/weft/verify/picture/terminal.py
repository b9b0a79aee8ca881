"""A picture as text: at most 100 columns, readable without colour.

Lanes stand at the left, one letter for each party; what a step did is said at its right. A signal
is a line from its dot to the wait that it let go; the order that a race lacks is a dashed one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from weft.base.place import Place
from weft.verify.picture.records import UNACQUIRED, Arrow, Picture, Row

WIDTH = 100
STEPS = 6  # columns of the step's number
MIN_GUTTER, WIDE_GUTTER, FEW_LANES = 2, 4, 4
MAX_PLACE = 30

GLYPHS = {
    "signal": "●", "pass": "○", "stuck": "✗", "wait": "◌", "begin": "┬", "end": "┴",
    "earlier": "◆", "later": "◆", "finding": "◆",
}  # fmt: skip
STYLES = {
    "signal": "green", "pass": "cyan", "stuck": "bold red", "earlier": "bold red",
    "later": "bold red", "finding": "bold red",
}  # fmt: skip

UP, DOWN, LEFT, RIGHT = 1, 2, 4, 8
BOXES = {
    UP: "│", DOWN: "│", UP | DOWN: "│", LEFT: "─", RIGHT: "─", LEFT | RIGHT: "─",
    DOWN | RIGHT: "╭", DOWN | LEFT: "╮", UP | RIGHT: "╰", UP | LEFT: "╯",
    UP | DOWN | RIGHT: "├", UP | DOWN | LEFT: "┤", LEFT | RIGHT | DOWN: "┬",
    LEFT | RIGHT | UP: "┴", UP | DOWN | LEFT | RIGHT: "┼",
}  # fmt: skip
DASHES = {"missing": {"│": "╎", "─": "╌"}, "value": {"│": "┊", "─": "┈"}}
ASCII = str.maketrans("●○✗◌┬┴◆·│─╭╮╰╯├┤┼╎╌┊┈▶◀…", "*oX.v^#.|-..''||+:~;.><.")
ARROWS = {"order": "green", "value": "yellow", "missing": "bold red"}


@dataclass
class Cell:
    """What lines go through a character; a `glyph` stands over them."""

    ways: int = 0
    glyph: str = ""
    style: str = ""
    dashes: str = ""

    def text(self) -> str:
        if self.glyph:
            return self.glyph
        box = BOXES.get(self.ways, " ")
        return DASHES.get(self.dashes, {}).get(box, box)


class Canvas:
    """Characters of `rows` lines; lines that meet join."""

    def __init__(self, rows: int, columns: int) -> None:
        self.cells = [[Cell() for _ in range(columns)] for _ in range(rows)]

    def put(self, row: int, x: int, glyph: str, style: str = "") -> None:
        cell = self.cells[row][x]
        cell.glyph, cell.style, cell.dashes = glyph, style, ""

    def across(self, row: int, start: int, end: int, style: str, dashes: str = "") -> None:
        """A line between two columns, both ends included as half ones."""
        lo, hi = sorted((start, end))
        for x in range(lo, hi + 1):
            self._draw(row, x, (LEFT if x > lo else 0) | (RIGHT if x < hi else 0), style, dashes)

    def down(self, x: int, start: int, end: int, style: str, dashes: str = "") -> None:
        for row in range(start, end + 1):
            ways = (UP if row > start else 0) | (DOWN if row < end else 0)
            self._draw(row, x, ways, style, dashes)

    def _draw(self, row: int, x: int, ways: int, style: str, dashes: str) -> None:
        cell = self.cells[row][x]
        cell.dashes = dashes if cell.dashes == dashes or not cell.ways else ""
        cell.ways |= ways
        cell.style = style or cell.style

    def line(self, row: int) -> Text:
        line = Text()
        for cell in self.cells[row]:
            line.append(cell.text(), cell.style)
        return line


def print_pictures(console: Console, pictures: Iterable[Picture], width: int = WIDTH) -> None:
    """Each picture on `console`; in ASCII where it knows nothing else."""
    is_ascii = not console.encoding.lower().replace("-", "").startswith("utf")
    for picture in pictures:
        console.print()
        text = render_ascii(picture, width) if is_ascii else render(picture, width)
        console.print(text, soft_wrap=True)


def render_ascii(picture: Picture, width: int = WIDTH) -> Text:
    """The same as `render`, for terminals and logs that cannot show boxes."""
    words = {"→": "->", "≥": ">="}
    rows = (replace(row, text=_replaced(row.text, words)) for row in picture.rows)
    text = render(replace(picture, rows=tuple(rows)), width)
    text.plain = text.plain.translate(ASCII).encode("ascii", "replace").decode("ascii")
    return text


def _replaced(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def render(picture: Picture, width: int = WIDTH) -> Text:
    """The whole of a picture: parties, steps, what is elsewhere."""
    lines = [*_legend(picture, width), Text(), *_diagram(picture, width)]
    if picture.absent:
        lines += [Text(), Text(_cut(f"  missing (dashed): {picture.absent}", width), "bold red")]
    if any(arrow.kind == "value" for arrow in picture.arrows):
        lines += [Text(), Text(f"  dotted: {UNACQUIRED}")]
    if picture.elsewhere:
        lines += [Text(), Text("  elsewhere at the end:")]
        lines += [Text(_cut(f"    {line}", width)) for line in picture.elsewhere]
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def _legend(picture: Picture, width: int) -> list[Text]:
    finding, shown = picture.finding, f"{picture.shown} of {picture.total} steps"
    title = "the last steps" if finding is None else finding.kind
    if finding is not None and finding.first.file:
        title += f" at {shown_path(finding.first.file)}:{finding.first.line}"
    lines = [Text(_cut(f"{title}, {shown}", width), "bold")]
    lines += [Text(_cut(f"  {lane.key}  {lane}", width)) for lane in picture.lanes]
    return lines


def _diagram(picture: Picture, width: int) -> list[Text]:
    """A header with the letters, then a line for each row."""
    paths, tracks = routes(picture)
    columns = _columns(picture, tracks)
    canvas = Canvas(len(picture.rows), columns[-1] + 1)
    for lane, x in zip(picture.lanes, columns):
        canvas.down(x, lane.first, lane.last, "dim")
    for arrow in sorted(picture.arrows, key=lambda arrow: arrow.kind):
        _draw_arrow(canvas, picture, columns, paths[arrow], arrow)
    for at, row in enumerate(picture.rows):
        canvas.put(at, columns[row.lane], GLYPHS.get(row.mark, "·"), STYLES.get(row.mark, ""))
    head = [" "] * len(canvas.cells[0]) if canvas.cells else []
    for lane, x in zip(picture.lanes, columns):
        head[x] = lane.key
    lines = [Text(f"{'step':>{STEPS}}  {''.join(head)}", "bold")]
    main = main_file(picture)
    for at, row in enumerate(picture.rows):
        line = Text(f"{row.step:>{STEPS}}  ", "dim")
        line.append_text(canvas.line(at))
        line.append_text(_said(picture, row, width - len(line.plain) - 2, main))
        lines.append(line)
    return lines


def _said(picture: Picture, row: Row, room: int, main: str | None) -> Text:
    """What a row says, its line of the source at the right."""
    place = _cut_left(short_place(row.place, main), MAX_PLACE)
    words = _cut(f"{picture.lanes[row.lane].key} {row.text}", room - len(place) - 2)
    text = Text("  " + words, STYLES.get(row.mark, ""))
    text.append(" " * max(2, room - len(words) - len(place)))
    text.append(place, "dim")
    return text


def _columns(picture: Picture, tracks: list[int]) -> list[int]:
    """The column of each lane, and last the width of all: a gutter holds its tracks and heads."""
    least = WIDE_GUTTER if len(picture.lanes) <= FEW_LANES else MIN_GUTTER
    gutters = [max(least, count + 2) if count else least for count in tracks]
    gutters[0] = 0
    if not tracks[-1]:
        gutters[-1] = 0
    columns, x = [], 0
    for gutter in gutters:
        x += gutter
        columns.append(x)
        x += 1
    return columns


def _draw_arrow(
    canvas: Canvas, picture: Picture, columns: list[int], route: Route, arrow: Arrow
) -> None:
    start = columns[picture.rows[arrow.start].lane]
    end = columns[picture.rows[arrow.end].lane]
    # Nothing leads into the first lane from its left, so there is a lane left of every gutter.
    x = columns[route.gutter - 1] + 2 + route.track
    style, dashes = ARROWS[arrow.kind], arrow.kind
    canvas.across(arrow.start, start, x, style, dashes)
    canvas.down(x, arrow.start, arrow.end, style, dashes)
    canvas.across(arrow.end, x, end, style, dashes)
    head = (end - 1, "▶") if x < end else (end + 1, "◀")
    canvas.put(arrow.end, *head, style)


# ---------------------------------------------------------------------------------------------
# Where arrows run: across in their start's row, down beside the lane they lead to, and in. In a row
# only one party does something, and between lanes nobody does: an arrow meets no mark but its own
# two. Gutter g lies left of lane g; arrows in it that overlap in time get a track each.


class Route(NamedTuple):
    """Track number `track` of the gutter left of lane `gutter`."""

    gutter: int
    track: int


def routes(picture: Picture) -> tuple[dict[Arrow, Route], list[int]]:
    """The route of each arrow, and how many tracks each gutter has (one more than lanes)."""
    found: dict[Arrow, Route] = {}
    gutters: list[list[list[tuple[Arrow, object]]]] = [[] for _ in range(len(picture.lanes) + 1)]
    for arrow in sorted(picture.arrows, key=lambda arrow: (arrow.end, arrow.start)):
        start, end = picture.rows[arrow.start].lane, picture.rows[arrow.end].lane
        gutter = end if start < end else end + 1
        # Signals of one wait may run together.
        joins = (arrow.end, arrow.kind)
        tracks = gutters[gutter]
        for track in tracks:
            if all(other == joins or not _overlap(arrow, a) for a, other in track):
                break
        else:
            track = []
            tracks.append(track)
        track.append((arrow, joins))
        found[arrow] = Route(gutter, tracks.index(track))
    return found, [len(tracks) for tracks in gutters]


def _overlap(a: Arrow, b: Arrow) -> bool:
    return a.start <= b.end and b.start <= a.end


def shown_path(file: str) -> str:
    """The path as a reader of the current folder would write it."""
    here = os.getcwd()
    inside = os.path.relpath(file, here) if os.path.isabs(file) else file
    return file if inside.startswith("..") else inside


def main_file(picture: Picture) -> str | None:
    """The file whose lines need no name."""
    if picture.finding is not None and picture.finding.first.file:
        return picture.finding.first.file
    frame = picture.rows[-1].place.outermost if picture.rows else None
    return None if frame is None else frame.file


def short_place(place: Place, main: str | None) -> str:
    """The user's line, with its file's name where that is not `main`."""
    frame = place.outermost
    if frame is None:
        return ""
    if frame.file == main:
        return f"line {frame.line}"
    return f"{os.path.basename(frame.file)}:{frame.line}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _cut_left(text: str, width: int) -> str:
    """The end of a path says more than its beginning."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]
