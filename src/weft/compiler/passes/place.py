"""Give every task its type: dtype, sizes and placement, from those of the inputs.

    g = all_gather(x, dim=0)      ->      g: bfloat16[m, 64] @ Replicate() = all_gather(x, dim=0)

Placements are never changed behind the user's back: a collective costs what it costs and stands in
the program. Where operands do not lie as an operation needs them, the error names the collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from weft.base.errors import PlacementError, ShapeError
from weft.ir import text
from weft.ir.shapes import ROWS, dtype_of, sizes_of
from weft.ir.task import Program, Task, placements_of
from weft.ir.tensor import (
    TABLE,
    ByExpert,
    Halves,
    Partial,
    Pieces,
    Placement,
    Replicate,
    Shard,
    Type,
)


def place(program: Program) -> Program:
    """Raises  ShapeError, PlacementError: which operands, and what would fix it"""
    types: dict[str, Type] = {}
    tasks = []
    for task in program.tasks:
        if task.kind != "input":
            task = _with_row(task, types)
            task = replace(task, type=_infer(program, task, types))
        assert task.type is not None
        if task.kind == "input" and len(task.type.sizes) not in (2, 3):
            message = f"{program.name}: {task.name} is {task.type.as_text()}; it has two dimensions"
            raise ShapeError(f"{message}, or three: experts' matrices", place=task.place)
        where = task.type.placement
        if isinstance(where, Pieces) and task.type.sizes[where.dim] != sum(where.sizes):
            message = f"{program.name}: {task.name} is {task.type.as_text()}; pieces of"
            raise ShapeError(f"{message} {sum(where.sizes)} do not fill it", place=task.place)
        if task.type.dtype == TABLE and task.name in program.results:
            message = f"{program.name} returns {task.name}, tables of moe_route"
            raise ShapeError(f"{message}; they are for its own tasks", place=task.place)
        types[task.name] = task.type
        tasks.append(task)
    return replace(program, tasks=tuple(tasks), stage="placed")


def _with_row(task: Task, types: Mapping[str, Type]) -> Task:
    """a + b of which one has one row for all rows of the other: that is its second operand."""
    if task.kind not in ROWS:
        return task
    of_one = [types[name].sizes[0] == 1 for name in task.operands]
    if of_one[0] == of_one[1]:
        return task
    operands = task.operands if of_one[1] else task.operands[::-1]
    return replace(task, kind=ROWS[task.kind], operands=operands)


def _infer(program: Program, task: Task, types: Mapping[str, Type]) -> Type:
    operands = [types[name] for name in task.operands]
    try:
        sizes = sizes_of(task, operands)
    except ValueError as error:
        raise ShapeError(f"{program.name}: {error}", place=task.place) from None
    given = [_placement(one) for one in operands]
    for wanted, result in placements_of(task, given):
        if list(wanted) == given:
            return Type(dtype_of(task, operands), sizes, result)
    raise PlacementError(
        f"{program.name}: {_mismatch(program, task, given)}", place=task.place
    ) from None


def _mismatch(program: Program, task: Task, given: Sequence[Placement]) -> str:
    operands = list(zip(task.operands, map(text.value, given)))
    message = f"{task.kind} cannot take " + " and ".join(f"{n} @ {where}" for n, where in operands)
    ways = sorted(_ways(program, task, given), key=lambda way: (len(way), way))
    if not ways:
        rows = [", ".join(map(text.value, wanted)) for wanted, _ in placements_of(task, given)]
        return f"{message}; it takes {' or '.join(rows)}"
    # The ways that change the fewest operands.
    best = [" and ".join(way) for way in ways if len(way) == len(ways[0])]
    if task.kind == "columns":
        best.append(_as_pieces(task, given[0]))
    return f"{message}; {';  or '.join(dict.fromkeys(best))}"


def _as_pieces(task: Task, given: Placement) -> str:
    """How columns that are split are taken apart where they lie."""
    if isinstance(given, Pieces):
        bounds = ", ".join(f"[:, {first}:{end}]" for first, end in given.bounds)
        return f"or take one of its pieces, {bounds}"
    return (
        f"or declare the weight that {task.operands[0]} is made of @ Pieces(1, (..)), and take one "
        "of its pieces, of which each rank has its part"
    )


def _ways(program: Program, task: Task, given: Sequence[Placement]) -> Iterator[list[str]]:
    """Each way to make the operands fit: what must lie otherwise, and how it would."""
    for wanted, _ in placements_of(task, given):
        way = []
        for name, there, needed in zip(task.operands, given, wanted):
            if there == needed:
                continue
            remedies = list(_remedies(program, name, there, needed))
            if not remedies:
                break
            way.append(f"{name} must be {text.value(needed)}: {' or '.join(remedies)}")
        else:
            yield way


def _remedies(program: Program, name: str, given: Placement, wanted: Placement) -> Iterator[str]:
    """How a value would come to lie as it is wanted."""
    if isinstance(given, Shard) and isinstance(wanted, Replicate):
        yield f"all_gather({name}, dim={given.dim})"
    declared = program.task(name).type
    is_rows = declared is None or len(declared.sizes) == 2
    if isinstance(given, Shard) and isinstance(wanted, Shard) and is_rows:
        yield f"all_to_all({name}, dim={wanted.dim})"
    if isinstance(given, Partial) and isinstance(wanted, Replicate):
        yield f"all_reduce({name})"
    if isinstance(given, Partial) and isinstance(wanted, Shard):
        yield f"reduce_scatter({name}, dim={wanted.dim})"
    if isinstance(given, Shard) and isinstance(wanted, ByExpert):
        yield f"ep_dispatch({name}, ..) of a row for each token"
    if isinstance(given, ByExpert) and isinstance(wanted, Shard):
        yield f"ep_combine({name}, ..)"
    if isinstance(given, Halves):
        yield f"silu_mul({name}, side_by_side=True)"
    if isinstance(given, Pieces):
        yield f"split({name}, {text.value(given.sizes)}), piece by piece"
    if isinstance(given, Shard) and isinstance(wanted, Halves | Pieces):
        yield f"declare the weight that it is made of @ {text.value(wanted)}"
    if program.task(name).kind == "input":
        yield "declare it so"


def _placement(kind: Type) -> Placement:
    assert kind.placement is not None
    return kind.placement
