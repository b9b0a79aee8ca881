"""A rank's tasks as the tables that the kernel reads: plain lists of numbers.

A row of `tasks` has the fields of tasks.scoreboard.Task, filled up to its length; it names its
body, and which of the body's operations it is of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.base.errors import ConfigError
from weft.megakernel.bodies import MOVES, Body
from weft.megakernel.records import REDUCES, TaskGraph, TileTask
from weft.megakernel.tasks import scoreboard

WAIT, BUMP = scoreboard.WAIT.value, scoreboard.BUMP.value


def tables(graph: TaskGraph, rank: int, bodies: Sequence[Body]) -> Iterator[list[int]]:
    """Of one rank, each table flat: tasks, waits, bumps, what counters come to, and how many tasks
    and counters there are.

    Raises  ConfigError: a task whose columns are not those of its tile
    """
    mine = graph.ranks[rank]
    found = {
        (one.task.name, one.kind): (i, j, body.tile)
        for i, body in enumerate(bodies)
        for j, one in enumerate(body.operations)
    }
    shared = {
        bump.counter
        for one in graph.tasks if one.rank != rank
        for bump in one.bumps if bump.rank == rank
    }  # fmt: skip
    tasks: list[int] = []
    waits: list[int] = []
    bumps: list[int] = []
    for task in mine.tasks:
        body, operation, tile = found[task.op, task.kind]
        _check_columns(task, tile)
        row = scoreboard.Task(
            body, operation, task.i_m, task.i_n, *_rows(graph, task), max(task.part, 0),
            len(task.waits), len(waits) // WAIT, *next(iter(task.waits), (0, 0)),
            len(task.bumps), len(bumps) // BUMP, *next(iter(task.bumps), (0, 0, 0)),
            int([one.rank for one in task.bumps] == [rank] and task.bumps[0].counter not in shared),
        )  # fmt: skip
        tasks += [*row, *[0] * (scoreboard.TASK.value - len(row))]
        waits += [word for one in task.waits[1:] for word in one]
        bumps += [word for one in task.bumps[1:] for word in one]
    yield from (tasks, waits, bumps)
    yield [*mine.counters]
    yield [len(mine.tasks), len(mine.counters)]


def _rows(graph: TaskGraph, task: TileTask) -> tuple[int, int, int, int, int]:
    """row, part_row, to_row, rows, owner: of what moves; of what computes i_m says it."""
    to = task.writes[0].region
    if task.kind not in MOVES:
        return 0, 0, 0, 0, 0
    rows = to.extents[0]
    if task.kind not in REDUCES:
        return task.reads[0].region.first_row, 0, to.first_row, rows, max(task.owner, 0)
    row = part_row = 0
    split = graph.program.task(graph.program.task(task.op).operands[0]).split_k
    for hop, read in enumerate(task.reads[: graph.num_ranks * split : split]):
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
