"""What one task can do instead of two: what follows is done to a tile while it is in registers.

    product = matmul(h, up);  gated = silu_mul(product)    ->    gated = matmul_silu_mul(h, up)
    summed = all_reduce(p);  x_2 = add(summed, x)          ->    x_2 = all_reduce_add(p, x)

For small m every rank sums for itself what all products send it as they are made: then a sum is one
way between ranks, not two, and no task sends.

Each task that is no more spares the way of a signal, and of a value through memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from weft.compiler.passes.tile import number
from weft.ir.shapes import GATED
from weft.ir.task import Program, Task, needs_of
from weft.megakernel.tiles import ONE_SHOT

# Rows of a sum, for each other rank, that every rank makes for itself.
ONE_SHOT_ROWS = 64


def fold(
    program: Program, sizes: Mapping[str, int], num_ranks: int, settled: Collection[str] = ()
) -> Program:
    """The tiled program in fewer tasks; those `settled`, whose tiles the user says, stay."""
    gone: set[str] = set()
    tasks = []
    for task in program.tasks:
        if task.name not in settled:
            for name in task.operands:
                before = program.task(name)
                is_free = _is_free(program, name, settled)
                if is_free and (one := _as_one(before, task, num_ranks)):
                    gone.add(name)
                    task = one
                    break
        tasks.append(task)
    folded = replace(program, tasks=tuple(one for one in tasks if one.name not in gone))
    return _summed_by_all(folded, sizes, num_ranks, settled)


def _is_free(program: Program, name: str, settled: Collection[str]) -> bool:
    """May the value be made otherwise, or not at all? One other task reads it, and no user does."""
    is_kept = name in settled or name in program.results
    return len(program.users(name)) == 1 and not is_kept


def _summed_by_all(
    program: Program, sizes: Mapping[str, int], num_ranks: int, settled: Collection[str]
) -> Program:
    """Sums for small m, and the products that they are of, by ONE_SHOT."""
    found: set[str] = set()
    for task in program.tasks:
        if task.kind in ("all_reduce", "all_reduce_add") and task.name not in settled:
            product = program.task(task.operands[0])
            assert task.type is not None
            rows = number(task.type.sizes[0], sizes) * (num_ranks - 1)
            is_small = 0 < rows <= ONE_SHOT_ROWS
            if is_small and product.kind == "matmul" and _is_free(program, product.name, settled):
                found |= {task.name, product.name}
    tasks = (replace(one, engine=ONE_SHOT) if one.name in found else one for one in program.tasks)
    return replace(program, tasks=tuple(tasks))


def _as_one(before: Task, task: Task, num_ranks: int) -> Task | None:
    """A task for two, the second of which reads the first; None where there is none."""
    assert before.type is not None
    if before.kind == "matmul" and task.kind in GATED and not before.dtype:
        # No pair of columns lies on two ranks.
        if number(before.type.sizes[1], {}) % (2 * num_ranks) == 0:
            rows, columns, *step = before.tile
            tile = (rows, max(1, columns // 2), *step)
            return _task(task, f"matmul_{task.kind}", before.operands, tile)
    if before.kind == "all_reduce" and task.kind == "add":
        (other,) = [one for one in task.operands if one != before.name] or [""]
        if other:
            return _task(task, "all_reduce_add", (*before.operands, other), before.tile)
    return None


def _task(task: Task, kind: str, operands: tuple[str, ...], tile: tuple[int, ...]) -> Task:
    one = replace(task, kind=kind, operands=operands, tile=tile)
    return replace(one, needs=needs_of(one))
