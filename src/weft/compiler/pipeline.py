"""What a program passes through, in this order and for these reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from weft.compiler.lower import unfused
from weft.compiler.passes.map import map_rows
from weft.compiler.passes.place import place
from weft.compiler.passes.tile import tile
from weft.ir import device, task
from weft.ir.device import Channel, Plan
from weft.ir.task import Program

Extents = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Pass:
    """A pass over Task IR, and why it stands where it stands.

    What it gives is Task IR for the next pass, or records of the Device level, which are kept.
    """

    name: str
    run: Callable[[Program], Any]
    why: str


def passes(extents: Extents | None = None) -> tuple[Pass, ...]:
    """All of them; `extents` are tiles of tasks by name."""
    return (
        Pass("place", place, "first: what a rank has of a tensor decides all that follows"),
        Pass("tile", partial(tile, extents=extents), "tiles are cut within what a rank has"),
        Pass("map", map_rows, "a mapping joins the tiles of two tasks: both must be cut"),
        Pass("unfused", unfused.lower, "last, since it leaves the level; it needs types alone"),
    )


@dataclass(frozen=True)
class Stages:
    """One program after each step."""

    tasks: Mapping[str, Program]
    channels: tuple[Channel, ...]
    plan: Plan

    @property
    def program(self) -> Program:
        """After the last pass over Task IR."""
        return list(self.tasks.values())[-1]


def compile_program(program: Program, extents: Extents | None = None) -> Stages:
    """Check, run each pass, check again. `extents` are tiles of tasks by name.

    Raises  what a pass raises, at the user's line; IllegalError: a pass broke a rule of the level
    """
    tasks = {"trace": task.require(program)}
    given: dict[str, Any] = {}
    for step in passes(extents):
        result = step.run(program)
        if isinstance(result, Program):
            program = tasks[step.name] = task.require(result)
        else:
            given[step.name] = result
    return Stages(tasks, given["map"], device.require(given["unfused"]))
