"""In which order a program's operations become tasks: by how many come before one another.

    k, turned_k, appended_k, v, appended_v, q, turned_q    ->    k, v, q, turned_k, appended_v,
                                                                 turned_q, appended_k

Workers take tasks in order and wait for what one reads. So operations that can begin at the same
time stand side by side: nobody waits for a rotation of k while a part of q is still to be made.
"""

from __future__ import annotations

from dataclasses import replace

from weft.ir.task import Program
from weft.megakernel.tiles import IN_PLACE


def by_depth(program: Program) -> Program:
    """The same tasks, each behind all that it reads; what is written in place comes behind all that
    read what was there."""
    depth: dict[str, int] = {}
    last_read: dict[str, int] = {}
    for task in program.tasks:
        after = [depth[name] for name in task.operands]
        if task.kind in IN_PLACE:
            after.append(last_read.get(task.operands[0], 0))
        own = depth[task.name] = 1 + max(after) if task.operands else 0
        for name in task.operands:
            last_read[name] = max(own, last_read.get(name, 0))
    ordered = sorted(program.tasks, key=lambda one: depth[one.name])
    return replace(program, tasks=tuple(ordered))
