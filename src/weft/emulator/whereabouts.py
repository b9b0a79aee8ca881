"""What ran, and at which line, when a run was interrupted."""

from __future__ import annotations

import linecache
import sys
import traceback
from types import TracebackType
from typing import Any

from weft.base.user_place import place_of

# What codegen calls the file of a kernel.
GENERATED = "<weft emulator:"


def where_host(rank: int, thread_id: int | None) -> str:
    """The line at which a rank's host code is, in its thread."""
    frame = place_of(sys._current_frames().get(thread_id or 0)).outermost
    line = f"{frame}: {frame.source()}" if frame is not None else "an unknown place"
    return f"rank {rank}'s host is at {line}"


def where_program(task: Any, trace: TracebackType | None) -> str:
    """The task of a scheduler that ran, and of a program the line from which `trace` has unwound:
    the comment above generated code says it."""
    kernel = getattr(getattr(task, "work", None), "kernel", None)
    if kernel is None:
        return "between two tasks"
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        file = frame.f_code.co_filename
        above = linecache.getlines(file)[:line] if file.startswith(GENERATED) else []
        for text in reversed(above):
            if text.strip().startswith("# "):
                return f"rank {task.rank} runs {kernel.name}{task.program} at {text.strip()[2:]}"
    return f"rank {task.rank} runs {kernel.name}{task.program}"
