"""Lower Task IR to calls of libraries, one after the other: nothing overlaps.

    h: bfloat16[m, 96] @ Shard(1) = matmul(g, w)    ->    h = buffer(bfloat16, (m, Part(96)))
                                                          call(matmul, (g, w), (h,))

The honest baseline inside the system: what any other lowering is compared with, and must not lose
to. It takes a placed program, tiled or not.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir.device import Buffer, Call, Part, Plan, Statement
from weft.ir.kinds import ATTRIBUTES
from weft.ir.task import Program, Task
from weft.ir.tensor import TABLE, Size, Type, is_split


def lower(program: Program) -> Plan:
    """The plan of each rank: a buffer for each value, a call for each task."""
    statements = tuple(_statements(program))
    return Plan(program.name, program.mesh, statements, program.results, place=program.place)


def _statements(program: Program) -> Iterator[Statement]:
    for task in program.tasks:
        assert task.type is not None
        role = "input" if task.kind == "input" else role_of(task.type)
        yield Buffer(task.name, task.type.dtype, local_sizes(task.type), role, place=task.place)
        if task.kind != "input":
            yield call(task)


def role_of(kind: Type) -> str:
    """Of what a task gives: tables bring their own memory."""
    return "tables" if kind.dtype == TABLE else "local"


def call(task: Task) -> Call:
    """A task as a library's call."""
    fields = {name: getattr(task, name) for name in ATTRIBUTES}
    return Call(task.kind, task.operands, (task.name,), **fields, place=task.place)


def local_sizes(kind: Type) -> tuple[Size | Part, ...]:
    """The sizes of what one rank has of a tensor."""
    return tuple(
        Part(size) if is_split(kind.placement, dim) else size for dim, size in enumerate(kind.sizes)
    )
