"""What a program passes through, in this order and for these reasons.

A program is placed when it is declared, and lowered twice: to calls of libraries at once, and to
what overlaps when it is called, since engines and tiles depend on sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weft.compiler.facts import Facts, Settings
from weft.compiler.lower import overlapped, unfused
from weft.compiler.passes.allocate import allocate
from weft.compiler.passes.attend import attend
from weft.compiler.passes.cut_chunks import chunk
from weft.compiler.passes.engines import engines
from weft.compiler.passes.fuse import fuse
from weft.compiler.passes.fuse_rows import fuse_rows
from weft.compiler.passes.insert_signals import insert_signals
from weft.compiler.passes.partition import partition
from weft.compiler.passes.place import place
from weft.compiler.passes.swizzle import swizzle
from weft.compiler.passes.tile import tile
from weft.ir import device_rules, task_rules
from weft.ir.device import Plan
from weft.ir.schedule import Schedule
from weft.ir.task import Program


@dataclass(frozen=True)
class Pass:
    """A pass over Task IR or over a plan, and why it stands where it stands."""

    name: str
    run: Callable[[Any], Any]
    why: str


# What asks for no sizes.
AT_DECLARATION = (
    Pass("place", place, "first: what a rank has of a tensor decides all that follows"),
    Pass("unfused", unfused.lower, "last, since it leaves the level; it needs types alone"),
)


def at_call(facts: Facts, settings: Settings) -> tuple[Pass, ...]:
    """From a placed program to a plan that overlaps, for sizes of one class."""
    given = {"facts": facts, "settings": settings}
    return (
        Pass("attend", attend,
             "before kernels: what it takes for one operator is no kernel's any more"),
        Pass("fuse", fuse,
             "before the rest: tiles, engines and orders are of kernels, not of tasks"),
        Pass("engines", partial(engines, **given),
             "before tiles: which tiles are best depends on how rows arrive"),
        Pass("fuse_rows", fuse_rows,
             "behind engines: what these leave to libraries leaves its epilogue, too"),
        Pass("tile", partial(tile, extents=settings.tiles),
             "before orders and chunks, which are of tiles"),
        Pass("swizzle", partial(swizzle, facts=facts),
             "behind engines, by which ranks wait for each other"),
        Pass("chunk", partial(chunk, **given), "how early a chunk is needed depends on the order"),
        Pass("partition", partial(partition, facts=facts),
             "last on this level: what runs beside a kernel is known now"),
        Pass("draw", overlapped.draw,
             "leaves the level: what moves and what runs; channels join tiles, chunks and words"),
        Pass("insert_signals", insert_signals, "who waits for whom follows from who touches what"),
        Pass("allocate", allocate, "last: lives of buffers follow from the order of steps"),
    )  # fmt: skip


@dataclass(frozen=True)
class Stages:
    """One program after each step, and its plans by the pass that gave them.

    `schedules`: how kernels run, by name; of others the executor decides. `recorded`: the stages of
    calls that the user records, where these cannot be.
    """

    tasks: Mapping[str, Program]
    plans: Mapping[str, Plan]
    recorded: Stages | None = None
    schedules: Mapping[str, Schedule] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        """After the last pass over Task IR."""
        return list(self.tasks.values())[-1]

    @property
    def plan(self) -> Plan:
        """The last."""
        return list(self.plans.values())[-1]


def compile_program(program: Program) -> Stages:
    """What can be done with a traced program before it is called.

    Raises  what a pass raises, at the user's line; IllegalError: a pass broke a rule of the level
    """
    return _run(AT_DECLARATION, program, {"trace": task_rules.require(program)})


def overlap(program: Program, facts: Facts, settings: Settings | None = None) -> Stages:
    """The plan that overlaps, of a placed program. Raises  as `compile_program`; ConfigError"""
    return _run(
        at_call(facts, settings or Settings()), program, {"place": task_rules.require(program)}
    )


def _run(steps: Sequence[Pass], program: Program, tasks: dict[str, Program]) -> Stages:
    """Check, run each pass, check again."""
    plans: dict[str, Plan] = {}
    at: Program | Plan = program
    for step in steps:
        result = step.run(at)
        if isinstance(result, Program):
            at = tasks[step.name] = task_rules.require(result)
        else:
            at = plans[step.name] = device_rules.require(result)
    return Stages(tasks, plans)
