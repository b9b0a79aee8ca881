"""From a tiled program to tasks with the counters they wait for and bump, on all ranks.

    tiles       every task, and what it needs that others make
    memory      where buffers lie, and which waits its reuse needs
    counters    what follows from the rest is left out; groups of tasks become counters

All of it is computed on the host from sizes alone, by every rank for all ranks: it then takes its
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.ir.task import Program
from weft.megakernel.counters import count, groups, stages_of, without_implied
from weft.megakernel.memory import REST, lay_out, reuses
from weft.megakernel.records import RankTasks, TaskGraph
from weft.megakernel.tiles import cut


def build(
    program: Program, sizes: Mapping[str, int], num_ranks: int, *, rest: int = REST
) -> TaskGraph:
    """The tasks of a tiled program; `rest` says after how many stages memory is used again.

    Tasks come in the order of the program, each behind all that it needs. So the first one of all
    ranks that is not done has all that it needs, and its worker is done with those before it: it
    ends, and so on. There is no deadlock; `check.py` shows it again of each graph.

    Raises  UsageError, UnsupportedError: what cannot be made of tasks, at the user's line
    """
    made = cut(program, sizes, num_ranks)
    layout = lay_out(made, rest=rest)
    stage_of = stages_of(made.stages)
    needs = without_implied([*made.needs, *reuses(made, layout)], stage_of)
    waits, bumps, totals = count(groups(needs, stage_of), made.tasks, num_ranks)
    tasks = [
        replace(task, waits=tuple(waits[i]), bumps=tuple(bumps[i]))
        for i, task in enumerate(made.tasks)
    ]
    ranks = tuple(
        RankTasks(rank, tuple(layout.buffers[rank].values()),
                  tuple(task for task in tasks if task.rank == rank), tuple(totals[rank]))
        for rank in range(num_ranks)
    )  # fmt: skip
    return TaskGraph(program, dict(sizes), num_ranks, ranks, made.results, layout.local_bytes,
                     layout.symmetric_bytes)  # fmt: skip
