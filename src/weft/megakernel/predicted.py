"""When workers do which task, before anything runs: all ranks played at once, in predicted time.

    predict(graph, workers)    list scheduling: a free worker takes, of what is ready, the task
                               with the longest way to the end behind it
    play(graph)                workers keep to the queues that the graph has

What a tile and a signal cost says the cost model (compiler/cost/tasks.py); what is compared are
schedules with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

from weft.base.dtypes import DTYPES
from weft.base.hardware import H200X4, Hardware
from weft.compiler.cost.tasks import move_us, product_us, signal_us
from weft.megakernel.check import before_in_queue, in_order
from weft.megakernel.records import TaskGraph, TileTask
from weft.megakernel.tiles import IN_PLACE


class Turn(NamedTuple):
    """A task by its number among all ranks'; its worker has waited for it since `taken_us`."""

    start_us: float
    end_us: float
    task: int
    worker: int
    taken_us: float


def task_us(task: TileTask, graph: TaskGraph, machine: Hardware, rows_of_tiles: int) -> float:
    """One task by one worker, of an operation with so many rows of tiles."""
    itemsize = DTYPES[graph.ranks[task.rank].buffer(task.writes[0].buffer).dtype].itemsize
    made = task.writes[0].region
    if task.kind == "matmul":
        k = task.reads[0].region.extents[1]
        return product_us(*made.extents, k, itemsize, rows_of_tiles, machine)
    cells = [prod(one.region.extents) for one in task.reads]
    if task.kind == "silu_mul_halves":
        cells = [2 * prod(made.extents)]  # of the rows that it waits for, the columns that it reads
    if task.kind in IN_PLACE:
        return move_us(2 * cells[1] * itemsize, machine)  # new rows alone are written
    return move_us((sum(cells) + prod(made.extents) * len(task.writes)) * itemsize, machine)


def durations(graph: TaskGraph, machine: Hardware) -> list[float]:
    rows: dict[tuple[int, str], int] = {}
    for task in graph.tasks:
        rows[task.rank, task.op] = max(rows.get((task.rank, task.op), 0), task.i_m + 1)
    return [task_us(task, graph, machine, rows[task.rank, task.op]) for task in graph.tasks]


def play(graph: TaskGraph, machine: Hardware = H200X4) -> list[Turn]:
    """The turns of a graph that has queues: each worker holds the next task of its queue, or of its
    rank's only one, until that is ready. None where they deadlock: where `check` finds a cycle."""
    tasks, us, behind = graph.tasks, durations(graph, machine), before_in_queue(graph)
    queue_of = {
        (rank.rank, id): number for rank in graph.ranks for number, queue in enumerate(rank.queues)
        for id in queue
    }  # fmt: skip
    free = {rank.rank: [(0.0, worker) for worker in range(graph.num_workers)]
            for rank in graph.ranks}  # fmt: skip
    full: dict[tuple[int, int], float] = {}
    turns: list[Turn] = []
    for i in in_order(tasks, behind)[0]:
        if not isinstance(i, int):
            continue
        task, own = tasks[i], free[tasks[i].rank]
        is_dynamic = graph.schedule == "dynamic"
        which = own.index(min(own)) if is_dynamic else queue_of[task.rank, task.id]
        taken, worker = own[which]
        start = max([taken, *(full[task.rank, one.counter] for one in task.waits)])
        turns.append(Turn(start, start + us[i], i, worker, taken))
        own[which] = (start + us[i], worker)
        for bump in task.bumps:
            at = start + us[i] + signal_us(task.rank, bump.rank, machine)
            key = (bump.rank, bump.counter)
            full[key] = max(full.get(key, 0.0), at)
    return sorted(turns)


def predict(graph: TaskGraph, num_workers: int, machine: Hardware = H200X4) -> list[Turn]:
    """Every task's turn by list scheduling, in the order in which they begin."""
    tasks, us = graph.tasks, durations(graph, machine)
    behind = _ways(graph, us, machine)
    waiters: dict[tuple[int, int], list[int]] = {}
    for i, task in enumerate(tasks):
        for wait in task.waits:
            waiters.setdefault((task.rank, wait.counter), []).append(i)
    missing = {(rank.rank, counter): total for rank in graph.ranks
               for counter, total in enumerate(rank.counters)}  # fmt: skip
    left = [len(task.waits) for task in tasks]
    ready: list[list[tuple[float, int]]] = [[] for _ in graph.ranks]
    idle: list[list[int]] = [[] for _ in graph.ranks]
    turns: list[Turn] = []
    # (when, rank, counter that is bumped or -1, worker that is free or -1); all are free at first.
    events = [(0.0, rank, -1, worker) for rank in range(graph.num_ranks)
              for worker in range(num_workers)]  # fmt: skip
    for i in (i for i, count in enumerate(left) if not count):
        heappush(ready[tasks[i].rank], (-behind[i], i))
    while events:
        now, rank, counter, worker = heappop(events)
        if counter < 0:
            heappush(idle[rank], worker)
        else:
            missing[rank, counter] -= 1
        for i in waiters.get((rank, counter), ()) if missing.get((rank, counter)) == 0 else ():
            left[i] -= 1
            if not left[i]:
                heappush(ready[rank], (-behind[i], i))
        if events and events[0][:2] == (now, rank):
            continue  # all that happens at this time comes first
        while ready[rank] and idle[rank]:
            i, worker = heappop(ready[rank])[1], heappop(idle[rank])
            end = now + us[i]
            turns.append(Turn(now, end, i, worker, now))
            heappush(events, (end, rank, -1, worker))
            for bump in tasks[i].bumps:
                at = end + signal_us(rank, bump.rank, machine)
                heappush(events, (at, bump.rank, bump.counter, -1))
    return sorted(turns)


def _ways(graph: TaskGraph, us: Sequence[float], machine: Hardware) -> list[float]:
    """From each task's begin to the end of all that waits for it, at least."""
    behind, longest = [0.0] * len(us), {}
    for i in reversed(in_order(graph.tasks, {})[0]):
        if isinstance(i, int):
            task = graph.tasks[i]
            ways = (longest.get((one.rank, one.counter), 0.0)
                    + signal_us(task.rank, one.rank, machine) for one in task.bumps)  # fmt: skip
            behind[i] = us[i] + max(ways, default=0.0)
            for wait in task.waits:
                key = (task.rank, wait.counter)
                longest[key] = max(longest.get(key, 0.0), behind[i])
    return behind
