"""Activations of more dimensions: a call takes [batch, sequence, columns] for [rows, columns].

    x: bfloat16[m, 64]; a call with x of [4, 512, 64]    ->    m = 2048, results are [4, 512, ..]

The dimensions before the last are rows, in order, as torch's own linear layers have it. A result
has them again where its rows lie as those of what was passed. Attention takes rows as tokens of one
sequence, so it is refused for several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from weft.base.errors import ShapeError, UnsupportedError
from weft.ir.task import Program
from weft.ir.tensor import Type, is_split

# By the name of rows, and whether they are split: what a tensor has before its last dimension.
Leading = dict[tuple[Any, bool], tuple[int, ...]]
# What takes neighbouring rows for tokens of one sequence.
OF_ONE_SEQUENCE = ("attention", "ag_attention")


def rows_of(program: Program) -> dict[int, tuple[Any, bool]]:
    """Of a program's inputs, by place, those with rows that have a name: which, and whether they
    are split."""
    types = [one.type for one in program.tasks if one.kind == "input"]
    return {
        i: _rows(one) for i, one in enumerate(types)
        if one is not None and len(one.sizes) == 2 and isinstance(one.sizes[0], str)
    }  # fmt: skip


def flattened(
    program: Program, tensors: Sequence[Any], rows: Mapping[int, tuple[Any, bool]]
) -> tuple[tuple[Any, ...], Leading]:
    """A call's tensors with all rows in one dimension, and which dimensions these were.

    Raises  ShapeError: tensors whose rows differ; UnsupportedError: attention of several sequences
    """
    leading: Leading = {}
    found = list(tensors)
    names = [one.name for one in program.tasks if one.kind == "input"]
    for i, key in rows.items():
        shape = tuple(tensors[i].shape)
        if len(shape) <= 2:
            continue
        if leading.setdefault(key, shape[:-1]) != shape[:-1]:
            message = f"{names[i]} has shape {shape}, another has {leading[key]} before its columns"
            raise ShapeError(f"{program.name}: {message}; both are the rows {key[0]}")
        found[i] = tensors[i].reshape(prod(shape[:-1]), shape[-1])
    for task in program.tasks:
        if task.kind in OF_ONE_SEQUENCE and any(prod(one[:-1]) != 1 for one in leading.values()):
            shapes = ", ".join(map(str, leading.values()))
            raise UnsupportedError(
                f"{program.name}: rows are {shapes}, and {task.kind} takes all rows as tokens of "
                "one sequence; call it for each sequence", place=task.place,
            )  # fmt: skip
    return tuple(found), leading


def restored(program: Program, results: Sequence[Any], leading: Leading) -> tuple[Any, ...]:
    """Results with the dimensions that their rows had."""
    types = [program.task(name).type for name in program.results]
    return tuple(
        one.unflatten(0, leading[_rows(kind)]) if kind and _rows(kind) in leading else one
        for one, kind in zip(results, types, strict=True)
    )


def _rows(kind: Type) -> tuple[Any, bool]:
    return kind.sizes[0], is_split(kind.placement, 0)
