"""Space-time pictures on the command line: below a report, and as a page with `--html FILE`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from weft.base.errors import UsageError
from weft.base.report import Report
from weft.tools import console

if TYPE_CHECKING:
    from weft.emulator.observation import Recorder

HTML_HELP = "write a picture of what was found, or of the last steps, that a browser shows"


def check_path(path: str, option: str = "--html") -> None:
    """Refuse a file that cannot be made, before the work and not behind it.

    Raises  UsageError: its folder does not exist
    """
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        raise UsageError(f"{option} {path}: there is no folder {folder}")


def show(recorder: Recorder, report: Report) -> None:
    """The first finding of each kind as a picture, on stdout; `recorder` heard a run of them."""
    from weft.verify.picture import explain
    from weft.verify.picture.terminal import print_pictures

    if not report.ok:
        pictures = explain(recorder.events, report, dropped=recorder.dropped)
        print_pictures(console.results(), pictures)


def write(path: str, recorder: Recorder, report: Report) -> None:
    """The same as a page, with more of the past and room for more parties.

    Raises  UsageError: the file cannot be written
    """
    from weft.verify.picture import explain
    from weft.verify.picture.page import LANES, ROWS, write

    pictures = explain(
        recorder.events, report, dropped=recorder.dropped, max_rows=ROWS, max_lanes=LANES
    )
    write(path, pictures, report)
    console.notes().print(f"[dim]picture in {path}: open it in a browser[/]")
