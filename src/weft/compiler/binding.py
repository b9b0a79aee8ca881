"""From one rank's tensors to the sizes that a program calls by name; and whether they fit it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.base.errors import DtypeError, ShapeError, UsageError
from weft.base.parts import full_part
from weft.compiler.passes.tile import bounds_of
from weft.ir.shapes import DTYPES_OF, GATED
from weft.ir.task import Program, Task
from weft.ir.tensor import Halves, Pieces, Shard, is_split


def bind(
    program: Program, tensors: Mapping[str, Any], sizes: Mapping[str, int], rank: int,
    num_ranks: int,
) -> dict[str, int]:  # fmt: skip
    """Every size by name: as given, else as a tensor has it, else as if all shards were full.

    Raises  ShapeError, DtypeError, UsageError: tensors that the declaration does not fit
    """
    inputs = [task for task in program.tasks if task.kind == "input"]
    if list(tensors) != [task.name for task in inputs]:
        message = f"takes {', '.join(task.name for task in inputs)}; given are {', '.join(tensors)}"
        raise UsageError(f"{program.name} {message}", place=program.place)
    named = {size for task in inputs for size in _type(task).sizes if isinstance(size, str)}
    if unknown := set(sizes) - named:
        message = f"has no parameter or size {', '.join(sorted(unknown))}; its parameters are "
        message += f"{', '.join(tensors)}, its sizes {', '.join(sorted(named)) or 'none'}"
        raise UsageError(f"{program.name} {message}", place=program.place)
    for name, size in sizes.items():
        if not hasattr(size, "__index__") or size < 0:
            message = f"{program.name}: {name}={size!r}; a size is a whole number from 0 on"
            raise ShapeError(message, place=program.place)
    found = dict(sizes)
    for is_shard in (False, True):
        for task in inputs:
            shape = _shape(program, task, tensors[task.name])
            for dim, size in enumerate(_type(task).sizes):
                if isinstance(size, str) and is_split(_type(task).placement, dim) == is_shard:
                    found.setdefault(size, shape[dim] * (num_ranks if is_shard else 1))
    for task in inputs:
        _check(program, task, tensors[task.name], found, rank, num_ranks)
    check_pairs(program, found, num_ranks)
    return found


def _check(
    program: Program, task: Task, tensor: Any, sizes: Mapping[str, int], rank: int, num_ranks: int
) -> None:
    kind = _type(task)
    if (dtype := str(tensor.dtype).removeprefix("torch.")) != kind.dtype:
        message = f"{task.name} is {dtype}, declared as {kind.dtype}"
        raise DtypeError(f"{program.name}: {message}; convert it", place=task.place)
    wanted = tuple(end - first for first, end in bounds_of(kind, rank, sizes, num_ranks))
    if tuple(tensor.shape) != wanted:
        bound = ", ".join(f"{name}={size}" for name, size in sizes.items())
        where = f"rank {rank} of {num_ranks} passes {task.name} of shape {tuple(tensor.shape)}"
        remedy = "; pass the size by name where shards differ" if isinstance(
            kind.placement, Shard | Halves | Pieces) else ""  # fmt: skip
        raise ShapeError(
            f"{program.name}: {where}, but of {kind.as_text()} with {bound or 'these sizes'} it "
            f"holds {wanted}{remedy}",
            place=task.place,
        )


def check_pairs(program: Program, sizes: Mapping[str, int], num_ranks: int) -> None:
    """Gate and value must be on one rank, a head's columns too; parts of a piece must be alike."""
    for task in program.tasks:
        where = _type(task).placement
        if isinstance(where, Pieces) and any(size % num_ranks for size in where.sizes):
            pieces = ", ".join(map(str, where.sizes))
            raise ShapeError(
                f"{program.name}: {task.name} lies in pieces of {pieces}, of which {num_ranks} "
                "ranks cannot have equal parts; take a number of ranks that divides each of them",
                place=task.place,
            )
        if task.head is not None:
            _check_heads(program, task, num_ranks)
        if task.kind.removesuffix("_halves") not in GATED:
            continue
        source = _type(program.task(task.operands[0]))
        columns = source.sizes[1]
        assert isinstance(columns, int)
        each = full_part(columns, num_ranks)
        if is_split(source.placement, 1) and num_ranks > 1 and each % 2:
            raise ShapeError(
                f"{program.name}: {task.kind} takes pairs of columns, but of {columns} on "
                f"{num_ranks} ranks each has {each}; take a width of which each has an even number",
                place=task.place,
            )


def _check_heads(program: Program, task: Task, num_ranks: int) -> None:
    assert task.head is not None
    for i, name in enumerate(task.operands):
        kind = _type(program.task(name))
        columns = kind.sizes[1]
        if (
            i not in DTYPES_OF.get(task.kind, {})
            and kind.placement == Shard(1)
            and isinstance(columns, int)
        ):
            if (each := full_part(columns, num_ranks)) % task.head:
                raise ShapeError(
                    f"{program.name}: {task.kind} takes heads of {task.head} columns, but of "
                    f"{columns} columns of {name} on {num_ranks} ranks each has {each}",
                    place=task.place,
                )


def _shape(program: Program, task: Task, tensor: Any) -> tuple[int, ...]:
    if len(tensor.shape) != (dims := len(_type(task).sizes)):
        wanted = {2: "two", 3: "three"}[dims]
        message = f"{task.name} has shape {tuple(tensor.shape)}; it must have {wanted} dimensions"
        raise ShapeError(f"{program.name}: {message}", place=task.place)
    return tuple(tensor.shape)


def _type(task: Task) -> Any:
    assert task.type is not None
    return task.type
