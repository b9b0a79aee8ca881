"""When workers do which task, before anything runs: all ranks played at once, in predicted time.

    predict(graph, workers)    list scheduling: a free worker takes, of what is ready, the task
                               with the longest way to the end behind it
    play(graph)                workers keep to the queues that the graph has

What a tile and a signal cost says the cost model (compiler/cost/tasks.py); what is compared are
schedules with each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from weft.base.dtypes import DTYPES
from weft.base.hardware import H200X4, Hardware
from weft.compiler.cost.tasks import move_us, product_us, signal_us
from weft.compiler.passes.tile import Region
from weft.megakernel.records import TaskGraph, TileTask
from weft.megakernel.tiles import IN_PLACE


class Turn(NamedTuple):
    """A task by its number among all ranks'; its worker has waited for it since `taken_us`."""

    start_us: float
    end_us: float
    task: int
    worker: int
    taken_us: float


def predict(graph: TaskGraph, num_workers: int, machine: Hardware = H200X4) -> list[Turn]:
    """Every task's turn, in the order in which they begin."""
    return sorted(_Listed(graph, machine, num_workers).turns)


def play(graph: TaskGraph, machine: Hardware = H200X4) -> list[Turn]:
    """The same of a graph that has queues. They deadlock where `check` finds a breach: then
    tasks are missing."""
    return sorted(_Queued(graph, machine, graph.num_workers).turns)


def task_us(task: TileTask, graph: TaskGraph, machine: Hardware, tiles: tuple[int, int]) -> float:
    """One task by one worker; `tiles` are the rows of tiles of its operation, and all of them."""
    itemsize = DTYPES[graph.ranks[task.rank].buffer(task.writes[0].buffer).dtype].itemsize
    made = task.writes[0].region
    if task.kind == "matmul":
        a = task.reads[0].region
        height, width = made.end_row - made.first_row, made.end_column - made.first_column
        k = a.end_column - a.first_column
        return product_us(height, width, k, itemsize, tiles[0], machine)
    cells = [_cells(one.region) for one in task.reads]
    if task.kind == "silu_mul_halves":
        cells = [2 * _cells(made)]  # of the rows that it waits for, the columns that it reads
    if task.kind in IN_PLACE:
        return move_us(2 * cells[1] * itemsize, machine)  # new rows alone are written
    return move_us((sum(cells) + _cells(made) * len(task.writes)) * itemsize, machine)


def _cells(region: Region) -> int:
    return (region.end_row - region.first_row) * (region.end_column - region.first_column)


def _durations(graph: TaskGraph, machine: Hardware) -> list[float]:
    tiles: dict[tuple[int, str], tuple[int, int]] = {}
    for task in graph.tasks:
        rows, count = tiles.get((task.rank, task.op), (0, 0))
        tiles[task.rank, task.op] = (max(rows, task.i_m + 1), count + 1)
    return [task_us(task, graph, machine, tiles[task.rank, task.op]) for task in graph.tasks]


class _Run:
    """All ranks' workers, task by task. Subclasses say which worker takes which task."""

    def __init__(self, graph: TaskGraph, machine: Hardware, num_workers: int) -> None:
        self.tasks = graph.tasks
        self.machine = machine
        self.turns: list[Turn] = []
        self.us = _durations(graph, machine)
        self.waiters: dict[tuple[int, int], list[int]] = {}
        for i, task in enumerate(self.tasks):
            for wait in task.waits:
                self.waiters.setdefault((task.rank, wait.counter), []).append(i)
        self.missing = {
            (rank.rank, counter): total
            for rank in graph.ranks
            for counter, total in enumerate(rank.counters)
        }
        self.left = [len(task.waits) for task in self.tasks]
        self.events: list[tuple[float, int, int, int]] = []
        self.prepare(graph, num_workers)
        for i, left in enumerate(self.left):
            if not left:
                self.is_ready(i)
        # Workers are free at first: that is an event like another.
        for rank in range(graph.num_ranks):
            for worker in range(num_workers):
                heappush(self.events, (0.0, rank, -1, worker))
        self._play()

    def prepare(self, graph: TaskGraph, num_workers: int) -> None:
        raise NotImplementedError

    def is_ready(self, i: int) -> None:
        """All that a task waits for has come."""
        raise NotImplementedError

    def is_free(self, now: float, rank: int, worker: int) -> None:
        """A worker has ended its task."""
        raise NotImplementedError

    def start(self, now: float, rank: int) -> None:
        """Begin what can begin, once all that happens at this time has happened."""
        raise NotImplementedError

    def _play(self) -> None:
        while self.events:
            now, rank, counter, worker = heappop(self.events)
            if counter < 0:
                self.is_free(now, rank, worker)
            else:
                self.missing[rank, counter] -= 1
                if not self.missing[rank, counter]:
                    self._full(rank, counter)
            if not self.events or self.events[0][:2] != (now, rank):
                self.start(now, rank)

    def _full(self, rank: int, counter: int) -> None:
        for i in self.waiters.get((rank, counter), ()):
            self.left[i] -= 1
            if not self.left[i]:
                self.is_ready(i)

    def begin(self, now: float, i: int, worker: int, taken: float) -> None:
        task, end = self.tasks[i], now + self.us[i]
        self.turns.append(Turn(now, end, i, worker, taken))
        heappush(self.events, (end, task.rank, -1, worker))
        for bump in task.bumps:
            at = end + signal_us(task.rank, bump.rank, self.machine)
            heappush(self.events, (at, bump.rank, bump.counter, -1))


class _Listed(_Run):
    """Ready tasks of a rank by the longest way behind them; a free worker takes the first."""

    def prepare(self, graph: TaskGraph, num_workers: int) -> None:
        self.behind = self._ways()
        self.ready: list[list[tuple[float, int]]] = [[] for _ in graph.ranks]
        self.idle: list[list[int]] = [[] for _ in graph.ranks]

    def is_ready(self, i: int) -> None:
        heappush(self.ready[self.tasks[i].rank], (-self.behind[i], i))

    def is_free(self, now: float, rank: int, worker: int) -> None:
        heappush(self.idle[rank], worker)

    def start(self, now: float, rank: int) -> None:
        while self.ready[rank] and self.idle[rank]:
            _, i = heappop(self.ready[rank])
            self.begin(now, i, heappop(self.idle[rank]), now)

    def _ways(self) -> list[float]:
        """From each task's begin to the end of all that waits for it, at least."""
        behind = [0.0] * len(self.tasks)
        longest: dict[tuple[int, int], float] = {}
        for i, task in _from_the_end(self.tasks, self.waiters):
            ways = (
                longest.get((one.rank, one.counter), 0.0)
                + signal_us(task.rank, one.rank, self.machine)
                for one in task.bumps
            )
            behind[i] = self.us[i] + max(ways, default=0.0)
            for wait in task.waits:
                key = (task.rank, wait.counter)
                longest[key] = max(longest.get(key, 0.0), behind[i])
        return behind


class _Queued(_Run):
    """A worker holds the next task of its queue, or of its rank's only one, until it is ready."""

    def prepare(self, graph: TaskGraph, num_workers: int) -> None:
        self.held: dict[int, tuple[int, float]] = {}
        self.can: list[list[int]] = [[] for _ in graph.ranks]
        firsts, self.queues = 0, []
        for rank in graph.ranks:
            queues = [iter([firsts + i for i in queue]) for queue in rank.queues]
            self.queues.append(queues * num_workers if graph.schedule == "dynamic" else queues)
            firsts += len(rank.tasks)

    def is_ready(self, i: int) -> None:
        if i in self.held:
            self.can[self.tasks[i].rank].append(i)

    def is_free(self, now: float, rank: int, worker: int) -> None:
        queue: Iterator[int] = self.queues[rank][worker]
        i = next(queue, None)
        if i is not None:
            self.held[i] = (worker, now)
            if not self.left[i]:
                self.can[rank].append(i)

    def start(self, now: float, rank: int) -> None:
        for i in sorted(self.can[rank]):
            worker, taken = self.held.pop(i)
            self.begin(now, i, worker, taken)
        self.can[rank] = []


def _from_the_end(
    tasks: Sequence[TileTask], waiters: dict[tuple[int, int], list[int]]
) -> Iterable[tuple[int, TileTask]]:
    """Numbered, each behind all that wait for it."""
    makers: dict[tuple[int, int], list[int]] = {}
    for i, task in enumerate(tasks):
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
            for maker in makers.get(key, ()) if not left[key] else ():
                bumps_left[maker] -= 1
                if not bumps_left[maker]:
                    found.append(maker)
