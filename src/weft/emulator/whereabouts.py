"""What runs now, and at which line: for a run that takes long or is interrupted."""

from __future__ import annotations

import linecache
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NamedTuple

from weft.base.user_place import place_of
from weft.emulator.scheduler import Scheduler

# What takes longer than this is asked where it is.
PATIENCE_S = 10.0
# What codegen calls the file of a kernel.
GENERATED = "<weft emulator:"


class Run(NamedTuple):
    """A machine's scheduler that runs, since when, in which thread."""

    scheduler: Scheduler
    began_s: float
    thread_id: int


# Those that run, the innermost last.
RUNS: list[Run] = []


@contextmanager
def running(scheduler: Scheduler) -> Iterator[None]:
    """While this is open the scheduler runs, in this thread; Ctrl-C says where it was."""
    RUNS.append(Run(scheduler, time.monotonic(), threading.get_ident()))
    try:
        yield
    except KeyboardInterrupt as error:
        if error.args:  # a host has said it
            raise
        raise KeyboardInterrupt(whereabouts(scheduler, error.__traceback__)) from None
    finally:
        RUNS.pop()


def whereabouts(scheduler: Scheduler, trace: TracebackType | None = None) -> str:
    """The task that runs and its line; of `trace`, where it has unwound already."""
    task = scheduler.running
    if task is None:
        return "nobody has begun"
    if hasattr(task, "thread_id"):  # a host
        frame = place_of(_frame(task.thread_id)).outermost
        line = f"{frame}: {frame.source()}" if frame is not None else "an unknown place"
        return f"rank {task.rank}'s host is at {line}"
    kernel = getattr(getattr(task, "work", None), "kernel", None)
    if kernel is None:
        return f"rank {task.rank} does its next work"
    thread_id = next((run.thread_id for run in RUNS[-1:]), 0)  # it may just have ended
    if trace is not None:
        lines = reversed(list(traceback.walk_tb(trace)))
    else:
        lines = traceback.walk_stack(frame) if (frame := _frame(thread_id)) is not None else ()
    who = f"rank {task.rank} runs {kernel.name}{getattr(task, 'program', '')}"
    where = next(filter(None, (_written(f.f_code.co_filename, line) for f, line in lines)), "")
    return f"{who} at {where}" if where else who


def _frame(thread_id: int) -> FrameType | None:
    return sys._current_frames().get(thread_id)


def _written(file: str, line: int) -> str:
    """The user's line that generated code was written for: the comment above it says so."""
    if not file.startswith(GENERATED):
        return ""
    above = linecache.getlines(file)[:line]
    return next((text.strip()[2:] for text in above[::-1] if text.strip().startswith("# ")), "")


class Watchman:
    """Reports once what runs where, of the first run that takes longer than `after_s`."""

    def __init__(self, tell: Callable[[str], None], after_s: float = PATIENCE_S) -> None:
        self.tell, self.after_s = tell, after_s

    def look(self, over: threading.Event) -> None:
        """Until it has reported, or `over` is set; for a thread of its own."""
        while not over.wait(min(1.0, self.after_s / 4)):
            late = time.monotonic() - self.after_s
            # One in which nobody has begun is looked at again.
            for run in [run for run in RUNS[-1:] if run.began_s < late and run.scheduler.running]:
                where = whereabouts(run.scheduler)
                self.tell(f"running for {self.after_s:.0f} s: {where}; Ctrl-C ends it")
                return
