"""Attention of split tokens over gathered keys becomes one operator, which gathers meanwhile.

    keys = all_gather(k, dim=0)
    values = all_gather(v, dim=0)                      ->    attended = ag_attention(q, k, v, ...)
    attended = attention(q, keys, values, ...)

Where nothing else reads what is gathered. The operator is a call like a library's: why no kernel
is generated for it is said in docs/decisions/015-attention.md.
"""

from __future__ import annotations

from dataclasses import replace

from weft.base.dtypes import FLOATS
from weft.ir.choice import Choice
from weft.ir.task import Program, Task
from weft.ir.tensor import Shard

# What the operator takes.
MOST_HEAD = 256
WHY = "keys arrive while queries run over those that are there"


def attend(program: Program) -> Program:
    """The program with `ag_attention` where gathers of keys and values can hide behind it."""
    replaced: dict[str, Task] = {}
    dropped: set[str] = set()
    for task in program.tasks:
        if gathers := _hidden(program, task):
            sources = [program.task(name).operands[0] for name in gathers]
            operands = (task.operands[0], *sources)
            replaced[task.name] = replace(task, kind="ag_attention", operands=operands)
            dropped.update(gathers)
    tasks = [replaced.get(one.name, one) for one in program.tasks if one.name not in dropped]
    chosen = [Choice(one.name, "operator", one.kind, WHY, one.place) for one in replaced.values()]
    return replace(program, tasks=tuple(tasks), choices=(*program.choices, *chosen))


def _hidden(program: Program, task: Task) -> tuple[str, ...]:
    """The gathers of an attention's keys and values that it alone reads; () if it is none such."""
    if task.kind != "attention" or task.type is None or task.type.placement != Shard(0):
        return ()
    is_taken = task.type.dtype in FLOATS and (task.head or 0) <= MOST_HEAD
    gathers = dict.fromkeys(task.operands[1:])
    is_hidden = all(
        one.kind == "all_gather" and one.dim == 0 and one.name not in program.results
        and program.users(one.name) == (task,)
        for one in map(program.task, gathers)
    )  # fmt: skip
    # One gather of keys that are values too is cheaper as it is.
    return tuple(gathers) if is_taken and is_hidden and len(gathers) == 2 else ()
