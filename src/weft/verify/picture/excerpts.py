"""The user's lines that a picture speaks of, with what happened at each."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable
from dataclasses import dataclass

from weft.base.place import Place
from weft.verify.picture.records import Picture

# Lines shown around one that matters, and the gap that is closed rather than cut.
AROUND = 1
GAP = 2

# Rows that the finding itself is about.
TELLING = ("earlier", "later", "stuck", "finding")


@dataclass(frozen=True)
class Line:
    """A source line; `notes` say what happened here, `telling` that the finding is about it."""

    number: int
    text: str
    notes: tuple[str, ...] = ()
    telling: bool = False


@dataclass(frozen=True)
class Excerpt:
    """Parts of one file: each a run of lines without a gap."""

    file: str
    parts: tuple[tuple[Line, ...], ...]


def excerpts(picture: Picture) -> list[Excerpt]:
    """The lines of the finding's sides, with what happened there."""
    notes: dict[tuple[str, int], dict[str, None]] = {}
    telling: set[tuple[str, int]] = set()
    for row in picture.rows:
        at = _at(row.place)
        if at and row.mark in TELLING:
            telling.add(at)
            note = f"{picture.lanes[row.lane].key} {row.text} (step {row.step})"
            notes.setdefault(at, {})[note] = None
    for side in picture.finding.sides if picture.finding else ():
        if side.file and side.line and (side.file, side.line) not in notes:
            notes[(side.file, side.line)] = {side.note: None} if side.note else {}
            telling.add((side.file, side.line))
    files = dict.fromkeys(file for file, _ in notes)
    return [
        Excerpt(file, _parts(file, {n: list(t) for (f, n), t in notes.items() if f == file},
                             {n for f, n in telling if f == file}))
        for file in files if linecache.getlines(file)
    ]  # fmt: skip


def _at(place: Place) -> tuple[str, int] | None:
    frame = place.outermost
    return None if frame is None else (frame.file, frame.line)


def _parts(
    file: str, notes: dict[int, list[str]], telling: set[int]
) -> tuple[tuple[Line, ...], ...]:
    source = linecache.getlines(file)
    wanted: set[int] = set()
    for number in notes:
        wanted.update(range(max(1, number - AROUND), min(len(source), number + AROUND) + 1))
    parts: list[list[Line]] = []
    previous = None
    for number in _closed(sorted(wanted)):
        line = Line(
            number, source[number - 1].rstrip(), tuple(notes.get(number, ())), number in telling
        )
        if previous is None or number > previous + 1:
            parts.append([])
        parts[-1].append(line)
        previous = number
    return tuple(tuple(_without_blank_ends(part)) for part in parts)


def _closed(numbers: list[int]) -> Iterable[int]:
    for at, number in enumerate(numbers):
        if at and number - numbers[at - 1] <= GAP + 1:
            yield from range(numbers[at - 1] + 1, number)
        yield number


def _without_blank_ends(part: list[Line]) -> list[Line]:
    while part and not part[0].text.strip():
        part = part[1:]
    while part and not part[-1].text.strip():
        part = part[:-1]
    return part


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
