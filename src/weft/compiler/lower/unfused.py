"""Lower Task IR to calls of libraries, one after the other: nothing overlaps.

    h: bfloat16[m, 96] @ Shard(1) = matmul(g, w)    ->    h = buffer(bfloat16, (m, Part(96)))
                                                          call(matmul, (g, w), (h,))

The honest baseline inside the system: what any other lowering is compared with, and must not lose
to. It takes a placed program, tiled or not.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir.device import Buffer, Call, Part, Plan, Statement
from weft.ir.task import Program, Shard, Type


def lower(program: Program) -> Plan:
    """The plan of each rank: a buffer for each value, a call for each task."""
    statements = tuple(_statements(program))
    return Plan(program.name, program.mesh, statements, program.results, place=program.place)


def _statements(program: Program) -> Iterator[Statement]:
    for task in program.tasks:
        assert task.type is not None
        role = "input" if task.kind == "input" else "local"
        yield Buffer(task.name, task.type.dtype, local_sizes(task.type), role, place=task.place)
        if task.kind != "input":
            fields = {"dim": task.dim, "eps": task.eps, "place": task.place}
            yield Call(task.kind, task.operands, (task.name,), **fields)


def local_sizes(kind: Type) -> tuple[int | str | Part, ...]:
    """The sizes of what one rank has of a tensor."""
    return tuple(
        Part(size) if kind.placement == Shard(dim) else size for dim, size in enumerate(kind.sizes)
    )
