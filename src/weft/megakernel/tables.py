"""A rank's queues as the tables that the kernel reads: plain lists of numbers.

A row of `tasks` has the fields of tasks.scoreboard.Task, filled up to its length; it names its
body, and which of the body's operations it is of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.base.errors import ConfigError
from weft.megakernel.bodies import MOVES, Body
from weft.megakernel.records import REDUCE, RankTasks, TaskGraph, TileTask
from weft.megakernel.tasks import scoreboard


@dataclass(frozen=True)
class Tables:
    """The tables of one rank, in the order of its queues; `firsts` says where each begins."""

    tasks: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    bumps: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...]
    totals: tuple[int, ...]

    @property
    def num_tasks(self) -> int:
        return len(self.tasks)


def tables(graph: TaskGraph, rank: int, bodies: Sequence[Body]) -> Tables:
    """Raises  ConfigError: a task whose columns are not those of its tile"""
    mine = graph.ranks[rank]
    numbers = {
        (one.task.name, one.kind): (i, j)
        for i, body in enumerate(bodies)
        for j, one in enumerate(body.operations)
    }
    tiles = {(one.task.name, one.kind): body.tile for body in bodies for one in body.operations}
    tasks: list[tuple[int, ...]] = []
    waits: list[tuple[int, ...]] = []
    bumps: list[tuple[int, ...]] = []
    for task in _queued(mine):
        first_wait, first_bump = len(waits), len(bumps)
        waits += [(one.counter, one.at_least) for one in task.waits]
        bumps += [(one.rank, one.counter, one.amount) for one in task.bumps]
        key = task.op, task.kind
        _check_columns(task, tiles[key])
        row = (*numbers[key], task.i_m, task.i_n, *_rows(graph, task))
        row = (*row, first_wait, len(waits), first_bump, len(bumps))
        tasks.append((*row, *[0] * (scoreboard.TASK.value - len(row))))
    ends = [0]
    for queue in mine.queues:
        ends.append(ends[-1] + len(queue))
    return Tables(tuple(tasks), tuple(waits), tuple(bumps), tuple(ends), mine.counters)


def _queued(mine: RankTasks) -> Iterable[TileTask]:
    return (mine.tasks[i] for queue in mine.queues for i in queue)


def _rows(graph: TaskGraph, task: TileTask) -> tuple[int, int, int, int, int]:
    """row, part_row, to_row, rows, owner: of what moves; of what computes i_m says it."""
    to = task.writes[0].region
    if task.kind not in MOVES:
        return 0, 0, 0, 0, 0
    rows = to.end_row - to.first_row
    if task.kind != REDUCE:
        return task.reads[0].region.first_row, 0, to.first_row, rows, max(task.owner, 0)
    row = part_row = 0
    for hop, read in enumerate(task.reads):
        of = (task.owner + hop) % graph.num_ranks
        if of == task.rank:
            row = read.region.first_row
        else:
            slab = graph.ranks[task.rank].buffer(read.buffer).rows // graph.num_ranks
            part_row = read.region.first_row - of * slab
    return row, part_row, to.first_row, rows, task.owner


def _check_columns(task: TileTask, tile: tuple[int, ...]) -> None:
    """A body finds columns by the tile's number."""
    read = task.reads[0].region if task.kind in MOVES else task.writes[0].region
    if read.first_column != task.i_n * tile[1]:
        message = (
            f"{task} begins at column {read.first_column}, not at tile {task.i_n} of {tile[1]}"
        )
        raise ConfigError(f"the persistent kernel: {message}")
