"""Space-time pictures on the command line: below a report, and as a page with `--html FILE`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from weft.base.errors import UsageError
from weft.base.report import Finding, Report
from weft.tools import console

if TYPE_CHECKING:
    from weft.emulator.observation import Recorder

# Runs that are repeated only to be drawn.
MOST_RUNS = 4


def check_path(path: str, option: str = "--html") -> None:
    """Refuse a file that cannot be made, before the work and not behind it.

    Raises  UsageError: its folder does not exist, or may not be written; it is a folder itself
    """
    if not path:
        return
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise UsageError(f"{option} {path}: there is no folder {folder}")
    if os.path.isdir(path):
        raise UsageError(f"{option} {path}: that is a folder; name a file in it")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"{option} {path}: it may not be written; name a file elsewhere")


def check_folder(path: str, option: str) -> None:
    """Refuse a folder that cannot be made. Raises  UsageError: something else is in its way"""
    there = os.path.abspath(path)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise UsageError(f"{option} {path}: {there} is no folder")
    if not os.access(there, os.W_OK):
        raise UsageError(f"{option} {path}: {there} may not be written; name a folder elsewhere")


class Seen(NamedTuple):
    """A run that somebody looked on at, and findings that it shows; none: how it ended."""

    recorder: Recorder
    findings: Sequence[Finding]


def seen_again(report: Report, again: Callable[[Finding], tuple[Recorder, Report]]) -> list[Seen]:
    """A run for the first finding of each kind; `again(finding)` is one that shows it."""
    from weft.verify.picture import firsts

    seen = []
    for finding in firsts(report)[:MOST_RUNS]:
        recorder, shown = again(finding)
        # As the observed run has it, with steps; what comparing runs showed is in none of them.
        same = next((one for one in shown if one.key() == finding.key()), finding)
        seen.append(Seen(recorder, [same]))
    return seen


def show(seen: Iterable[Seen]) -> None:
    """The first finding of each kind as a picture, on stdout."""
    from weft.verify.picture import explain
    from weft.verify.picture.terminal import print_pictures

    for recorder, findings in seen:
        if findings:
            pictures = explain(recorder.events, findings, dropped=recorder.dropped)
            print_pictures(console.results(), pictures)


def write(path: str, seen: Iterable[Seen], report: Report) -> None:
    """The same as a page, with more of the past and room for more parties.

    Raises  UsageError: the file cannot be written
    """
    from weft.verify.picture import explain
    from weft.verify.picture.page import LANES, ROWS, write

    pictures = [
        picture
        for recorder, findings in seen
        for picture in explain(
            recorder.events, findings, dropped=recorder.dropped, max_rows=ROWS, max_lanes=LANES
        )
    ]
    write(path, pictures, report)
    console.notes().print(f"[dim]picture in {path}: open it in a browser[/]")
