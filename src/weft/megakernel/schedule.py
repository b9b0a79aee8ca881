"""Which worker runs which task when: queues of every rank from one order of all ranks' tasks.

    round_robin    in the order of the program, dealt to workers by turns
    balanced       list scheduling: whoever is free takes, of what is ready, the task with the
                   longest way to the end behind it, by predicted times; queues are what came out
    dynamic        one queue in the order in which `balanced` has them begin; workers take the next

Whatever the schedule, queues are taken from one order of all ranks' tasks in which nobody comes
before whom it needs. So the first task in it that is not done has all that it needs, and those
before it in its own queue are done: its worker is at it. It ends, and so on: nothing stands still.
Where workers take the next task, one worker is enough. `check.py` shows it again, of queues alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

from weft.base.dtypes import DTYPES
from weft.base.errors import ConfigError
from weft.compiler.cost.machine import H200X4, Machine
from weft.compiler.passes.tile import Region
from weft.megakernel.records import SCHEDULES, TaskGraph, TileTask

# From a bump to who waits for it on the same rank, and what a task costs beside its tile: guesses.
LOCAL_US, TASK_US = 0.5, 1.0


class Turn(NamedTuple):
    """A task by its number among all ranks', when its worker begins and ends it by prediction."""

    start_us: float
    end_us: float
    task: int
    worker: int


def schedule(
    graph: TaskGraph, how: str = "balanced", num_workers: int = 132, machine: Machine = H200X4
) -> TaskGraph:
    """The graph with queues.

    Raises  ConfigError: a schedule that there is not; no worker
    """
    if how not in SCHEDULES or num_workers < 1:
        told = f"schedule={how!r} for {num_workers} workers; it is {' or '.join(SCHEDULES)}"
        raise ConfigError(f"{graph.program.name}: {told}, for 1 or more", place=graph.program.place)
    if how == "round_robin":
        queues = [_dealt(len(rank.tasks), num_workers) for rank in graph.ranks]
    else:
        queues = _queues(graph, predict(graph, num_workers, machine), how, num_workers)
    ranks = tuple(
        replace(rank, queues=tuple(map(tuple, own))) for rank, own in zip(graph.ranks, queues)
    )
    return replace(graph, ranks=ranks, schedule=how, num_workers=num_workers)


def _dealt(num_tasks: int, num_workers: int) -> list[Iterable[int]]:
    return [range(worker, num_tasks, num_workers) for worker in range(num_workers)]


def _queues(
    graph: TaskGraph, turns: Sequence[Turn], how: str, num_workers: int
) -> list[list[list[int]]]:
    count = 1 if how == "dynamic" else num_workers
    queues: list[list[list[int]]] = [[[] for _ in range(count)] for _ in graph.ranks]
    tasks = graph.tasks
    for turn in turns:
        task = tasks[turn.task]
        queues[task.rank][0 if how == "dynamic" else turn.worker].append(task.id)
    return queues


def predict(graph: TaskGraph, num_workers: int, machine: Machine = H200X4) -> list[Turn]:
    """Every task's turn, in the order in which they begin: the longest way to the end first."""
    run = _Run(graph, num_workers, machine)
    return sorted(run.turns)


def task_us(task: TileTask, graph: TaskGraph, machine: Machine, rows_of_tiles: int = 1) -> float:
    """One task by one worker. Rows of tiles share what they read of a product's other operand."""
    itemsize = DTYPES[graph.ranks[task.rank].buffer(task.writes[0].buffer).dtype].itemsize
    made = _cells(task.writes[0].region)
    if task.kind == "matmul":
        a, b = (read.region for read in task.reads)
        flops = 2 * made * (a.end_column - a.first_column)
        read_us = _cells(b) * itemsize / rows_of_tiles / (machine.few_gbps / machine.num_sms)
        return TASK_US + max(flops / machine.program_tflops / 1e6, read_us / 1e3)
    if task.kind.endswith("attention"):
        # A tile reads its own heads of what is declared as read whole.
        cells = sum(_cells(one.region) for one in task.reads) / max(1, rows_of_tiles)
    else:
        cells = sum(_cells(one.region) for one in task.reads) + made * len(task.writes)
    return TASK_US + cells * itemsize / machine.combine_gbps / 1e3


def _cells(region: Region) -> int:
    return (region.end_row - region.first_row) * (region.end_column - region.first_column)


class _Run:
    """All ranks' workers, task by task, in predicted time."""

    def __init__(self, graph: TaskGraph, num_workers: int, machine: Machine) -> None:
        self.tasks = graph.tasks
        self.machine = machine
        self.turns: list[Turn] = []
        self._us = _durations(graph, machine)
        self._waiters: dict[tuple[int, int], list[int]] = {}
        for i, task in enumerate(self.tasks):
            for wait in task.waits:
                self._waiters.setdefault((task.rank, wait.counter), []).append(i)
        self._missing = {
            (rank.rank, counter): total
            for rank in graph.ranks
            for counter, total in enumerate(rank.counters)
        }
        self._left = [len(task.waits) for task in self.tasks]
        self._behind = self._ways()
        self._ready: list[list[tuple[float, int]]] = [[] for _ in graph.ranks]
        self._idle = [list(range(num_workers)) for _ in graph.ranks]
        self._events: list[tuple[float, int, int, int]] = []
        self._play()

    def _signal_us(self, sender: int, receiver: int) -> float:
        return LOCAL_US if sender == receiver else self.machine.signal_us

    def _ways(self) -> list[float]:
        """From each task's begin to the end of all that waits for it, at least."""
        behind = [0.0] * len(self.tasks)
        longest: dict[tuple[int, int], float] = {}
        for i, task in _from_the_end(self.tasks):
            ways = (
                longest.get((one.rank, one.counter), 0.0) + self._signal_us(task.rank, one.rank)
                for one in task.bumps
            )
            behind[i] = self._us[i] + max(ways, default=0.0)
            for wait in task.waits:
                key = (task.rank, wait.counter)
                longest[key] = max(longest.get(key, 0.0), behind[i])
        return behind

    def _play(self) -> None:
        for i, left in enumerate(self._left):
            if not left:
                heappush(self._ready[self.tasks[i].rank], (-self._behind[i], i))
        for rank in range(len(self._ready)):
            self._start(0.0, rank)
        while self._events:
            now, rank, counter, worker = heappop(self._events)
            if counter < 0:
                heappush(self._idle[rank], worker)
            else:
                self._count(rank, counter)
            # All that happens at one time happens before anybody begins.
            if not self._events or self._events[0][:2] != (now, rank):
                self._start(now, rank)

    def _count(self, rank: int, counter: int) -> None:
        self._missing[rank, counter] -= 1
        if self._missing[rank, counter]:
            return
        for i in self._waiters.get((rank, counter), ()):
            self._left[i] -= 1
            if not self._left[i]:
                heappush(self._ready[rank], (-self._behind[i], i))

    def _start(self, now: float, rank: int) -> None:
        while self._ready[rank] and self._idle[rank]:
            _, i = heappop(self._ready[rank])
            worker = heappop(self._idle[rank])
            end = now + self._us[i]
            self.turns.append(Turn(now, end, i, worker))
            heappush(self._events, (end, rank, -1, worker))
            for bump in self.tasks[i].bumps:
                at = end + self._signal_us(rank, bump.rank)
                heappush(self._events, (at, bump.rank, bump.counter, -1))


def _from_the_end(tasks: Sequence[TileTask]) -> Iterable[tuple[int, TileTask]]:
    """Numbered, each behind all that wait for it: as stages are, and ranks are not, in order."""
    waiters: dict[tuple[int, int], list[int]] = {}
    makers: dict[tuple[int, int], list[int]] = {}
    for i, task in enumerate(tasks):
        for wait in task.waits:
            waiters.setdefault((task.rank, wait.counter), []).append(i)
        for bump in task.bumps:
            makers.setdefault((bump.rank, bump.counter), []).append(i)
    left = {key: len(found) for key, found in waiters.items()}
    bumps_left = [len(task.bumps) for task in tasks]
    found = [i for i, count in enumerate(bumps_left) if not count]
    for i in found:
        yield i, tasks[i]
        for wait in tasks[i].waits:
            key = (tasks[i].rank, wait.counter)
            left[key] -= 1
            if not left[key]:
                for maker in makers.get(key, ()):
                    bumps_left[maker] -= 1
                    if not bumps_left[maker]:
                        found.append(maker)


def _durations(graph: TaskGraph, machine: Machine) -> list[float]:
    heights: dict[tuple[int, str], int] = {}
    for task in graph.tasks:
        key = (task.rank, task.op)
        heights[key] = max(heights.get(key, 0), task.i_m + 1)
    return [task_us(task, graph, machine, heights[task.rank, task.op]) for task in graph.tasks]
