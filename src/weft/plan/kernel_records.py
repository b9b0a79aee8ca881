"""An operator's kernel as a record: how it is compiled where nobody has tensors.

Not an operator: what all of them tell of their kernels, and in which words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weft.base.dtypes import DTYPES
from weft.base.records import KernelRecord
from weft.language.world_arg import SlotArg, WorldArg, language_version
from weft.tiles import gemm_sm90


def record(
    fn: Any,
    name: str,
    num_ranks: int,
    types: Mapping[str, Any],
    *,
    tuples: Mapping[str, Any],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    aligned: Iterable[str] = (),
) -> tuple[Any, KernelRecord]:
    """`fn` and its record; what is said here of arguments that it lacks is left out.

    `types` are Triton's words. `tuples` are of runtime integers, unless `types` says otherwise: by
    their types. What has no type is a constant. Slot and world are known. Divisible by 16 are all
    pointers and what is `aligned`, arguments or "argument.field".
    """
    fixed = {x: value for x, value in constants.items() if isinstance(value, tuple)}
    words = {
        "slot": ["*i64", "*i32", "*i64"],
        "world": ["*i64", "constexpr", "constexpr"],
        **{x: ["constexpr"] * len(value) for x, value in fixed.items()},
        **{x: ["i32"] * len(kind._fields) for x, kind in tuples.items()},
        **types,
    }
    values = {
        "slot": SlotArg(None, None, None),
        "world": WorldArg(None, num_ranks, language_version()),
        **{x: kind(*[None] * len(kind._fields)) for x, kind in tuples.items()},
        **constants,
    }
    names = fn.arg_names
    pointers = [x for x in names if isinstance(words.get(x), str) and words[x][0] == "*"]
    return fn, KernelRecord(
        name=name,
        signature={x: words.get(x, "constexpr") for x in names},
        constants={x: values[x] for x in names if x in values},
        options=dict(options),
        divisible_by_16=(*pointers, *(x for x in aligned if x.partition(".")[0] in names)),
    )


def operand(dtype: str, block: tuple[int, int], by_tma: bool, is_sm90: bool = False) -> str:
    """The word of a tensor of `dtype`: a descriptor of blocks where it is moved by TMA."""
    element = DTYPES[dtype]
    if not by_tma:
        return f"*{element.triton}"
    layout = f",{gemm_sm90.block_layout(block, element.itemsize)!r}" if is_sm90 else ""
    return f"tensordesc<{element.triton}[{block[0]}, {block[1]}]{layout}>"


def aligned_sizes(name: str, sizes: Any) -> list[str]:
    """Which of the named tuple's sizes are divisible by 16; it is the argument `name`."""
    return [f"{name}.{x}" for x, size in sizes._asdict().items() if size % 16 == 0]
