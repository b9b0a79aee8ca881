"""A compiled program: called like the function it was, and looked at step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.compiler import pipeline
from weft.compiler.binding import bind
from weft.compiler.passes import map as mapping
from weft.ir import device, task
from weft.ir.device import Plan
from weft.ir.task import Program

if TYPE_CHECKING:
    from weft.compiler.libraries import Collectives


class Compiled:
    """What `weft.program` makes of a function."""

    def __init__(self, program: Program) -> None:
        self.stages = pipeline.compile_program(program)

    def __call__(self, *tensors: Any, world: Any, collectives: Collectives, **sizes: int) -> Any:
        """Run it on this rank's parts, by calls of libraries. Collective.

            y = mlp(x, w1, w2, world=world, collectives=weft.ops, m=997)

        Shapes  each tensor is what its placement leaves to this rank; a size that the declaration
                names may be given by that name, and must be where shards differ
        Sync    stream-ordered on the current stream
        Raises  ShapeError, DtypeError, UsageError: with the values and the declaration's line
        """
        from weft.compiler import libraries

        program = self.stages.program
        names = [one.name for one in program.tasks if one.kind == "input"]
        given = dict(zip(names, tensors, strict=False))
        if len(tensors) > len(names):
            given |= {f"argument {i}": None for i in range(len(names), len(tensors))}
        bound = bind(program, given, sizes, world.rank, world.num_ranks)
        results = libraries.run(self.plan, given, bound, world=world, collectives=collectives)
        return results if len(results) != 1 else results[0]

    @property
    def plan(self) -> Plan:
        """What each rank does."""
        return self.stages.plan

    def check(self, num_ranks: int, **sizes: int) -> None:
        """Show that every mapping fits at these sizes. Raises  ConfigError: with the tiles"""
        for channel in self.stages.channels:
            mapping.check(channel, sizes, num_ranks)

    def texts(self) -> dict[str, str]:
        """The IR after each step, as text."""
        found = {
            name: task.show(program, places=False) for name, program in self.stages.tasks.items()
        }
        found["map"] = device.text.show(self.stages.channels, places=False)
        found["unfused"] = device.show(self.plan, places=False)
        return found
