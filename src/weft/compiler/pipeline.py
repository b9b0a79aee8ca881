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
from weft.compiler.lower.kernels import EPILOGUES
from weft.compiler.lower.supported import ENGINES, ORDERS
from weft.compiler.passes.allocate import allocate
from weft.compiler.passes.attend import attend
from weft.compiler.passes.cut_chunks import chunk
from weft.compiler.passes.engines import engines
from weft.compiler.passes.fuse import fuse
from weft.compiler.passes.insert_signals import insert_signals
from weft.compiler.passes.map import map_rows
from weft.compiler.passes.partition import partition
from weft.compiler.passes.place import place
from weft.compiler.passes.swizzle import swizzle
from weft.compiler.passes.tile import tile
from weft.ir import device, task
from weft.ir.device import Channel, Plan
from weft.ir.schedule import Schedule
from weft.ir.task import Program

Extents = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Pass:
    """A pass over Task IR or over a plan, and why it stands where it stands.

    What it gives is Task IR or a plan for the next pass, or channels, which are kept.
    """

    name: str
    run: Callable[[Any], Any]
    why: str


def at_declaration(extents: Extents | None = None) -> tuple[Pass, ...]:
    """What asks for no sizes; `extents` are tiles of tasks by name."""
    return (
        Pass("place", place, "first: what a rank has of a tensor decides all that follows"),
        Pass("tile", partial(tile, extents=extents), "tiles are cut within what a rank has"),
        Pass("map", map_rows, "a mapping joins the tiles of two tasks: both must be cut"),
        Pass("unfused", unfused.lower, "last, since it leaves the level; it needs types alone"),
    )


def at_call(facts: Facts, settings: Settings) -> tuple[Pass, ...]:
    """From a placed program to a plan that overlaps, for sizes of one class."""
    channels: list[Channel] = []

    def mapped(program: Program) -> Program:
        channels.extend(map_rows(program))
        return program

    def drawn(program: Program) -> Plan:
        return overlapped.draw(program, channels, facts)

    given = {"facts": facts, "settings": settings}
    return (
        Pass("attend", attend,
             "before kernels: what it takes for one operator is no kernel's any more"),
        Pass("fuse", partial(fuse, epilogues=EPILOGUES),
             "before the rest: tiles, engines and orders are of kernels, not of tasks"),
        Pass("engines", partial(engines, **given, known=ENGINES),
             "before tiles: which tiles are best depends on how rows arrive"),
        Pass("tile", partial(tile, extents=settings.tiles),
             "before orders and chunks, which are of tiles"),
        Pass("swizzle", partial(swizzle, **given, orders_known=ORDERS),
             "a user's order is checked for these tiles"),
        Pass("chunk", partial(chunk, **given), "how early a chunk is needed depends on the order"),
        Pass("partition", partial(partition, facts=facts),
             "last on this level: what runs beside a kernel is known now"),
        Pass("map", mapped, "a mapping joins tiles, chunks and words: all must be cut"),
        Pass("draw", drawn, "leaves the level: what moves and what runs"),
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
    channels: tuple[Channel, ...]
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


def compile_program(program: Program, extents: Extents | None = None) -> Stages:
    """What can be done with a traced program before it is called.

    Raises  what a pass raises, at the user's line; IllegalError: a pass broke a rule of the level
    """
    return _run(at_declaration(extents), program, {"trace": task.require(program)})


def overlap(program: Program, facts: Facts, settings: Settings | None = None) -> Stages:
    """The plan that overlaps, of a placed program. Raises  as `compile_program`; ConfigError"""
    return _run(at_call(facts, settings or Settings()), program, {"place": task.require(program)})


def _run(steps: Sequence[Pass], program: Program, tasks: dict[str, Program]) -> Stages:
    """Check, run each pass, check again."""
    channels: tuple[Channel, ...] = ()
    plans: dict[str, Plan] = {}
    at: Program | Plan = program
    for step in steps:
        result = step.run(at)
        if isinstance(result, Program):
            at = tasks[step.name] = task.require(result)
        elif isinstance(result, Plan):
            at = plans[step.name] = device.require(result)
        else:
            channels = result
    return Stages(tasks, channels or tuple(plans_channels(plans)), plans)


def plans_channels(plans: Mapping[str, Plan]) -> list[Channel]:
    """Those of the last plan."""
    return list(plans.values())[-1].of(Channel) if plans else []
