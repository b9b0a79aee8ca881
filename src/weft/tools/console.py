"""Where the command line's words go: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

FINE, PROBLEM, MISUSE, INTERRUPTED = 0, 1, 2, 130

# Into a pipe or a file, tables may be as wide as a page is.
PIPE_WIDTH = 120

# What is quicker than this needs no bar.
BAR_AFTER_S = 2.0
# Where there is no terminal for a bar, so often a line says that there is progress.
LIFE_S = 10.0


def results() -> Console:
    """The console of results; made anew, so that it follows a redirected stdout."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(file=sys.stdout, highlight=False, soft_wrap=True, width=width)


def notes() -> Console:
    """The console of progress and errors."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def print_json(values: Any) -> None:
    sys.stdout.write(json.dumps(values, indent=2) + "\n")


def print_table(rows: list[tuple[str, ...]], *header: str) -> None:
    """Rows of words under a header; the first column never wraps."""
    table = Table(*header, box=None, pad_edge=False, header_style="bold", show_header=bool(header))
    if not header:
        for _ in rows[0]:
            table.add_column()
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*row)
    results().print(table)


@contextmanager
def patience(what: str) -> Iterator[None]:
    """While this is open, a run that takes long says on stderr that it lives.

    Where there is no terminal, whose bars show it: every `LIFE_S` seconds, with what is being done
    and how far it is.
    """
    if sys.stderr.isatty():
        yield
        return
    over, began = threading.Event(), time.monotonic()

    def watch() -> None:
        while not over.wait(LIFE_S):
            words = [f"{what}: {time.monotonic() - began:.0f} s"]
            words += [one.words for one in _bars[-1:]]
            notes().print(f"[yellow]weft:[/] {escape('; '.join(words))}")

    threading.Thread(target=watch, name="weft-patience", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class Bar:
    """A progress bar that appears once the work has taken `BAR_AFTER_S`.

    before: what is done while how much there is to do is not known
    """

    def __init__(self, what: str, total: int, before: str = "") -> None:
        self.what, self.total, self.done, self.before = what, total, 0, before
        self.start = time.monotonic()
        self.display: Progress | None = None

    @property
    def words(self) -> str:
        if self.before and not self.total:
            return self.before
        return f"{self.what} {self.done} of {self.total}"

    def advance(self) -> None:
        self.reach(self.done + 1, self.total)

    def reach(self, done: int, total: int) -> None:
        """So much of so much is done."""
        self.done, self.total = done, total
        late = time.monotonic() - self.start > BAR_AFTER_S
        if self.display is None and late and sys.stderr.isatty():
            columns = (TextColumn(self.what), BarColumn(), MofNCompleteColumn())
            self.display = Progress(
                *columns, TimeElapsedColumn(), console=notes(), transient=True, auto_refresh=False
            )
            self.task = self.display.add_task(self.what, total=self.total)
            self.display.start()
        if self.display is not None:
            self.display.update(self.task, completed=done, total=total, refresh=True)


# Those under way, the innermost last.
_bars: list[Bar] = []


@contextmanager
def bar(what: str, total: int = 0, before: str = "") -> Iterator[Bar]:
    shown = Bar(what, total, before)
    _bars.append(shown)
    try:
        yield shown
    finally:
        _bars.remove(shown)
        if shown.display is not None:
            shown.display.stop()
