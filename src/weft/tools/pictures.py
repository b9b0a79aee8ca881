"""Space-time pictures on the command line: below a report, and as a page with `--html FILE`."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weft.base.errors import UsageError
from weft.base.report import Finding, Report
from weft.tools import console

if TYPE_CHECKING:
    from weft.emulator.observation import Recorder

# Runs that are repeated only to be drawn.
MOST_RUNS = 4
# A page has room for more than a terminal.
ROWS, LANES, WIDTH = 60, 16, 160


def check_path(path: str, option: str = "--html") -> None:
    """Refuse a file that cannot be made, before the work and not behind it. An empty path asks for
    none; a file that is there keeps what is in it.

    Raises  UsageError: its folder does not exist, it may not be written, it is a folder itself
    """
    if not path:
        return
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise UsageError(f"{option} {path}: there is no folder {folder}")
    if os.path.isdir(path):
        raise UsageError(f"{option} {path}: that is a folder; name a file in it")
    there = os.path.realpath(path)
    is_new = not os.path.exists(there)
    if not is_new and not os.path.isfile(there):
        return  # a pipe or a device: to open it may wait for who reads
    try:
        open(there, "ab").close()
    except OSError as error:
        raise UsageError(
            f"{option} {path}: it cannot be written: {error.strerror}; name a file elsewhere"
        ) from None
    if is_new:
        os.remove(there)


def check_folder(path: str, option: str) -> None:
    """Refuse a folder that cannot be made or written to; it is made, and is gone again where it was
    not there: nothing may come to lie in it.

    Raises  UsageError: something else is in its way, or no file can be made there
    """
    made, there = [], os.path.abspath(path)
    while not os.path.lexists(there):
        made.append(there)
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise UsageError(f"{option} {path}: {there} is no folder")
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(
            f"{option} {path}: no file can be written there: {error.strerror}; name a folder"
            " elsewhere"
        ) from None
    finally:
        with suppress(OSError):  # not made, or another process has put something there
            for folder in made:
                os.rmdir(folder)


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
    """The report and the same pictures as a page, with more of the past and of the parties.

    Raises  UsageError: the file cannot be written
    """
    from rich.console import Console

    from weft.verify.picture import explain
    from weft.verify.picture.terminal import print_pictures

    page = Console(record=True, file=io.StringIO(), highlight=False, soft_wrap=True)
    page.print(str(report), markup=False)
    for recorder, findings in seen:
        pictures = explain(
            recorder.events, findings, dropped=recorder.dropped, max_rows=ROWS, max_lanes=LANES
        )
        print_pictures(page, pictures, WIDTH)
    save(path, page.export_html())
    console.notes().print(f"[dim]picture in {path}: open it in a browser[/]")


def save(path: str, text: str) -> None:
    """Raises  UsageError: the file cannot be written"""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
