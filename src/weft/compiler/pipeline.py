"""What a program passes through, in this order and for these reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.compiler.lower import unfused
from weft.compiler.passes.map import map_rows
from weft.compiler.passes.place import place
from weft.compiler.passes.tile import tile
from weft.ir import device, task
from weft.ir.device import Channel, Plan
from weft.ir.task import Program


@dataclass(frozen=True)
class Pass:
    """A pass over Task IR, and why it stands where it stands."""

    name: str
    run: Callable[..., Program]
    why: str


PASSES = (
    Pass("place", place, "first: what a tensor's rank has decides everything that follows"),
    Pass("tile", tile, "then tiles, which are cut within what a rank has"),
)
# After these: `map`, which needs both sides' tiles to join them by signal words, and gives records
# of the Device level; `unfused`, the lowering, which needs types alone and is last because it
# leaves the level.


@dataclass(frozen=True)
class Stages:
    """One program after each step."""

    tasks: Mapping[str, Program]
    channels: tuple[Channel, ...]
    plan: Plan

    @property
    def program(self) -> Program:
        """After the last pass."""
        return list(self.tasks.values())[-1]


def compile_program(
    program: Program, extents: Mapping[str, tuple[int, int]] | None = None
) -> Stages:
    """Check, run each pass, check again. `extents` are tiles of tasks by name.

    Raises  what a pass raises, at the user's line; IllegalError: a pass broke a rule of the level
    """
    tasks = {"trace": task.require(program)}
    for step in PASSES:
        program = step.run(program, extents) if step.run is tile else step.run(program)
        tasks[step.name] = task.require(program)
    channels = map_rows(program)
    return Stages(tasks, channels, device.require(unfused.lower(program)))
