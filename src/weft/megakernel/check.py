"""What holds of every graph and its queues, shown again from the records alone.

A table of rules that is run, as for the levels of the IR; each names tasks and the user's lines.
That there is no deadlock follows from three of them. Let all ranks' tasks be ordered by their
waits and by the order of each queue, and let that have no cycle (`acyclic`). Then there is one
order of all tasks in which each comes behind whatever it waits for, and behind those before it in
its queue. Of the tasks that are not done take the first. All that it waits for is done, so its
counters are full: a wait asks for what is bumped (`counted`). All before it in its queue are done:
with a queue for each worker, that worker is at it (`queued`); where workers take the next of one
queue, those before have been taken and done, so that there is a worker free to take it. It ends,
and there is one less.

Memory is right if of two accesses to one byte, one of them a write, one is over before the other
begins (`ordered`), who reads a value comes behind those who make it (`made`), and nobody writes
another value there in between (`kept`). Where workers take the next task the order of the queue
orders no accesses: then waits alone must.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import islice, product
from typing import NamedTuple

from weft.base.place import Place
from weft.ir.legality import Rule, Violation, illegal, run
from weft.megakernel.memory import span_of
from weft.megakernel.records import GIVEN, Access, TaskGraph, TileTask

# Of one rule; a wrong rule of the compiler would name each task.
MOST_BREACHES = 8
# All pairs of accesses to the same bytes are looked at: seconds from some thousands of tasks on.
MOST_TASKS = 2000
STAGES = ("signals", "queues", "order", "memory")
# Rows of a buffer that are looked at together.
BAND = 64
Breaches = Iterator[tuple[str, Place]]


class Order:
    """What is before each task, as bits of tasks by their number among all ranks'.

    `by_queues`: those before it in its queue too. There must be no cycle.
    """

    def __init__(self, graph: TaskGraph, *, by_queues: bool) -> None:
        self.tasks = graph.tasks
        self.before = [0] * len(self.tasks)
        behind = before_in_queue(graph) if by_queues else {}
        order, _ = in_order(self.tasks, behind)
        makers: dict[tuple[int, int], int] = {}
        for node in order:
            if not isinstance(node, int):
                continue
            task = self.tasks[node]
            for one in task.waits:
                self.before[node] |= makers.get((task.rank, one.counter), 0)
            if node in behind:
                self.before[node] |= self.before[behind[node]] | 1 << behind[node]
            for one in task.bumps:
                done = self.before[node] | 1 << node
                makers[one.rank, one.counter] = makers.get((one.rank, one.counter), 0) | done

    def is_before(self, first: int, second: int) -> bool:
        return bool(self.before[second] >> first & 1)

    def are_before(self, firsts: Touch, seconds: Touch) -> bool:
        """Are all of the one before all of the other?"""
        asked = sum(1 << i for i in firsts.numbers)
        return all(self.before[i] & asked == asked for i in seconds.numbers)


def in_order(
    tasks: Sequence[TileTask], behind: Mapping[int, int]
) -> tuple[list[int | tuple[int, int]], list[int]]:
    """Tasks by number, and counters between them, each behind whom it needs; `behind` is what comes
    before a task in its queue. Or nothing, and tasks of which each is before the next, the last
    before the first."""
    sorter: TopologicalSorter = TopologicalSorter()
    for i, task in enumerate(tasks):
        sorter.add(i, *((task.rank, one.counter) for one in task.waits))
        for one in task.bumps:
            sorter.add((one.rank, one.counter), i)
    for i, earlier in behind.items():
        sorter.add(i, earlier)
    try:
        return [*sorter.static_order()], []
    except CycleError as error:
        return [], [i for i in error.args[1][:-1] if isinstance(i, int)]


def before_in_queue(graph: TaskGraph) -> dict[int, int]:
    """Of each task the one before it in its queue, by numbers among all ranks'."""
    firsts, found = 0, {}
    for rank in graph.ranks:
        for queue in rank.queues:
            for earlier, later in zip(queue, queue[1:]):
                found[firsts + later] = firsts + earlier
        firsts += len(rank.tasks)
    return found


def _place(graph: TaskGraph, task: TileTask) -> Place:
    return graph.program.task(task.op).place


def _counted(graph: TaskGraph) -> Breaches:
    given: Counter[tuple[int, int]] = Counter()
    for task in graph.tasks:
        for one in task.bumps:
            given[one.rank, one.counter] += one.amount
            if not 0 <= one.rank < graph.num_ranks or one.amount < 1:
                yield f"{task} bumps {one}: of {graph.num_ranks} ranks", _place(graph, task)
            elif not 0 <= one.counter < len(graph.ranks[one.rank].counters):
                message = f"{task} bumps {one}, but rank {one.rank} has"
                yield (
                    f"{message} {len(graph.ranks[one.rank].counters)} counters",
                    _place(graph, task),
                )
    for rank in graph.ranks:
        for counter, total in enumerate(rank.counters):
            if given[rank.rank, counter] != total:
                message = f"counter {counter} of rank {rank.rank} is said to come to {total}"
                by = _names(one for one in graph.tasks if _bumps(one, rank.rank, counter))
                yield (
                    f"{message}, but is bumped by {given[rank.rank, counter]}: {by}",
                    _where(graph, rank.rank, counter),
                )
    for task in graph.tasks:
        for one in task.waits:
            total = given[task.rank, one.counter]
            if one.at_least != total:
                message = f"{task} waits until counter {one.counter} has come to {one.at_least}"
                yield f"{message}, but all bumps of it are {total}", _place(graph, task)


def _bumps(task: TileTask, rank: int, counter: int) -> bool:
    return any((one.rank, one.counter) == (rank, counter) for one in task.bumps)


def _names(tasks: Iterator[TileTask]) -> str:
    found = [*map(str, islice(tasks, 4))]
    return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "") if found else "nobody"


def _where(graph: TaskGraph, rank: int, counter: int) -> Place:
    """The line of a task that waits for a counter, or that bumps it."""
    waiting = (
        one for one in graph.ranks[rank].tasks if any(wait.counter == counter for wait in one.waits)
    )
    found = next(waiting, None) or next(
        (one for one in graph.tasks if _bumps(one, rank, counter)), None
    )
    return _place(graph, found) if found else graph.program.place


def _awaited(graph: TaskGraph) -> Breaches:
    waited = {(task.rank, one.counter) for task in graph.tasks for one in task.waits}
    for task in graph.tasks:
        for one in task.bumps:
            if (one.rank, one.counter) not in waited:
                message = f"{task} bumps counter {one.counter} of rank {one.rank}"
                yield f"{message}, for which nobody waits", _place(graph, task)


def _queued(graph: TaskGraph) -> Breaches:
    if not graph.schedule:
        return
    for rank in graph.ranks:
        wanted = 1 if graph.schedule == "dynamic" else graph.num_workers
        if len(rank.queues) != wanted or graph.num_workers < 1:
            message = (
                f"rank {rank.rank} has {len(rank.queues)} queues for {graph.num_workers} workers"
            )
            yield f"{message}, scheduled {graph.schedule}; it takes {wanted}", graph.program.place
        times = Counter(i for queue in rank.queues for i in queue)
        for i, task in enumerate(rank.tasks):
            if times[i] != 1:
                yield f"{task} is queued {times[i]} times; it must be once", _place(graph, task)
        if strange := [i for i in times if not 0 <= i < len(rank.tasks)]:
            message = f"rank {rank.rank} has tasks 0 to {len(rank.tasks) - 1}, queued are {strange}"
            yield message, graph.program.place


def _acyclic(graph: TaskGraph) -> Breaches:
    tasks = graph.tasks
    cycle = [tasks[i] for i in in_order(tasks, before_in_queue(graph))[1]]
    if cycle:
        message = ", ".join(
            _why(graph, earlier, later) for earlier, later in zip([cycle[-1], *cycle], cycle)
        )
        yield f"nobody can begin: {message}", _place(graph, cycle[0])


def _why(graph: TaskGraph, earlier: TileTask, later: TileTask) -> str:
    if any(_bumps(earlier, later.rank, wait.counter) for wait in later.waits):
        return f"{later} waits for {earlier}"
    for worker, queue in enumerate(graph.ranks[later.rank].queues):
        if later.id in queue:
            return f"{later} is queued behind {earlier}, queue {worker}"
    return f"{later} is behind {earlier}"


class Touch(NamedTuple):
    """Accesses to the same elements by tasks `numbers`; bytes of whole rows first .. end - 1."""

    first: int
    end: int
    is_write: bool
    access: Access
    numbers: tuple[int, ...]

    def meets(self, other: Touch) -> bool:
        """Of two that share rows of a buffer: do they share elements?"""
        mine, theirs = self.access.region, other.access.region
        return mine[2] < theirs[3] and theirs[2] < mine[3]


def _memories(graph: TaskGraph) -> Iterator[list[Touch]]:
    """Of each rank, all accesses to its local memory, to its symmetric one, to each of the
    caller's; by where they begin."""
    buffers = [{one.name: one for one in rank.buffers} for rank in graph.ranks]
    found: dict[tuple[int, str], dict[tuple[bool, Access], dict[int, None]]] = {}
    for number, task in enumerate(graph.tasks):
        for is_write, accesses in ((False, task.reads), (True, task.writes)):
            for one in accesses:
                role = buffers[one.rank][one.buffer].role
                memory = (one.rank, one.buffer if role in GIVEN else role)
                if not one.region.is_empty:
                    found.setdefault(memory, {}).setdefault((is_write, one), {})[number] = None
    for alike in found.values():
        if any(is_write for is_write, _ in alike):
            yield sorted(
                Touch(*span_of(one, buffers[one.rank][one.buffer]), is_write, one, tuple(numbers))
                for (is_write, one), numbers in alike.items()
            )


def conflicts(graph: TaskGraph) -> Iterator[tuple[Touch, Touch]]:
    """Pairs of accesses to the same bytes, of which one is a write.

    Within a buffer by what is touched of rows, between buffers by whole rows, whoever touches them.
    """
    for touches in _memories(graph):
        by_buffer: dict[str, list[Touch]] = {}
        for one in touches:
            by_buffer.setdefault(one.access.buffer, []).append(one)
            if one.is_write and len(one.numbers) > 1:
                yield one, one
        for own in by_buffer.values():
            yield from (pair for pair in _sharing_rows(own) if pair[0].meets(pair[1]))
        for pair in _sharing_rows(_whole_rows(touches)) if len(by_buffer) > 1 else ():
            if pair[0].access.buffer != pair[1].access.buffer:
                yield pair


def _sharing_rows(touches: Sequence[Touch]) -> Iterator[tuple[Touch, Touch]]:
    """Pairs of `touches`, which come by where they begin, of which one is a write."""
    open_ones: list[Touch] = []
    for one in touches:
        open_ones = [other for other in open_ones if other.end > one.first]
        for other in open_ones:
            if one.is_write or other.is_write:
                yield other, one
        open_ones.append(one)


def _whole_rows(touches: Sequence[Touch]) -> list[Touch]:
    """Those of one buffer and the same rows as one."""
    found: dict[tuple, tuple[Touch, dict[int, None]]] = {}
    for one in touches:
        _, numbers = found.setdefault((one.access.buffer, *one[:3]), (one, {}))
        numbers.update(dict.fromkeys(one.numbers))
    return [one._replace(numbers=tuple(numbers)) for one, numbers in found.values()]


def _ordered(graph: TaskGraph) -> Breaches:
    order = Order(graph, by_queues=graph.schedule != "dynamic")
    reported: set[tuple[int, int]] = set()
    for one, other in conflicts(graph):
        if order.are_before(one, other) or order.are_before(other, one):
            continue
        for i, j in product(one.numbers, other.numbers):
            if i == j or (i, j) in reported or order.is_before(i, j) or order.is_before(j, i):
                continue
            reported.update(((i, j), (j, i)))
            both = f"{graph.tasks[i]} {_does(one)} and {graph.tasks[j]} {_does(other)}"
            where = f"in the same bytes of rank {one.access.rank}"
            last = graph.tasks[max(i, j)]
            yield f"{both}, {where}, and neither waits for the other", _place(graph, last)


def _does(touch: Touch) -> str:
    rows = f"{touch.access.region.first_row} to {touch.access.region.end_row - 1}"
    return f"{'writes' if touch.is_write else 'reads'} {touch.access.buffer} rows {rows}"


def _made(graph: TaskGraph) -> Breaches:
    """Each element that is read has been written once, by a task before."""
    for one, other in conflicts(graph):
        access = one.access
        if one.is_write and other.is_write and access.buffer == other.access.buffer:
            if graph.ranks[access.rank].buffer(access.buffer).role != "input":
                tasks = [graph.tasks[touch.numbers[-1]] for touch in (one, other)]
                message = f"{tasks[0]} and {tasks[1]} both make elements of {access.buffer}"
                yield f"{message} on rank {access.rank}", _place(graph, tasks[0])
    order = Order(graph, by_queues=graph.schedule != "dynamic")
    written: dict[tuple[int, str, int], list[tuple[int, Access]]] = {}
    for number, task in enumerate(graph.tasks):
        for one in task.writes:
            for band in _bands(one):
                written.setdefault((one.rank, one.buffer, band), []).append((number, one))
    for number, task in enumerate(graph.tasks):
        for read in task.reads:
            if graph.ranks[read.rank].buffer(read.buffer).role == "input":
                continue
            makers = {
                pair
                for band in _bands(read)
                for pair in written.get((read.rank, read.buffer, band), ())
            }
            missing = _cells(read)
            for maker, access in sorted(makers):
                shared = _cells(access._replace(region=access.region.within(read.region)))
                missing -= shared
                if shared and not order.is_before(maker, number):
                    message = (
                        f"{task} reads {read.buffer}, and does not wait for {graph.tasks[maker]}"
                    )
                    yield f"{message}, which makes it", _place(graph, task)
            if missing:
                message = f"of the {_cells(read)} elements of {read.buffer} that {task} reads"
                yield f"{message} {_cells(read) - missing} are made", _place(graph, task)


def _bands(access: Access) -> range:
    first, end = access.region.first_row, access.region.end_row
    return range(first // BAND, -(-end // BAND)) if first < end else range(0)


def _cells(access: Access) -> int:
    region = access.region
    if region.is_empty:
        return 0
    return (region.end_row - region.first_row) * (region.end_column - region.first_column)


def _kept(graph: TaskGraph) -> Breaches:
    """Of two buffers in the same bytes one is over before the other begins."""
    order = Order(graph, by_queues=graph.schedule != "dynamic")
    earlier: dict[tuple[int, frozenset[str]], tuple[Touch, Touch]] = {}
    for pair in conflicts(graph):
        if pair[0].access.buffer == pair[1].access.buffer:
            continue
        first, second = pair if order.are_before(*pair) else pair[::-1]
        if not order.are_before(first, second):
            both = " and ".join(f"{graph.tasks[one.numbers[0]]} {_does(one)}" for one in pair)
            message = (
                f"on rank {first.access.rank} {both}, in the same bytes: neither buffer is over"
            )
            yield (
                f"{message} before the other begins",
                _place(graph, graph.tasks[second.numbers[0]]),
            )
            continue
        key = (first.access.rank, frozenset(one.access.buffer for one in pair))
        known = earlier.setdefault(key, (first, second))
        if known[0].access.buffer != first.access.buffer:
            message = " before ".join(
                f"{graph.tasks[one.numbers[0]]} {_does(one)}" for one in known
            )
            now = (f"{graph.tasks[one.numbers[0]]} {_does(one)}" for one in (first, second))
            message = (
                f"on rank {first.access.rank} {message}, but {' before '.join(now)}, in its bytes"
            )
            yield message, _place(graph, graph.tasks[second.numbers[0]])


def _few(rule: Callable[[TaskGraph], Breaches]) -> Callable[[TaskGraph], Breaches]:
    return lambda graph: islice(rule(graph), MOST_BREACHES)


RULES = (
    Rule("counted", "a wait for more than comes never ends, for less may end too early",
         _few(_counted), "signals"),
    Rule("awaited", "a bump that nobody waits for is a waste", _few(_awaited), "signals"),
    Rule("queued", "a task is done once, by a worker that there is", _few(_queued), "queues"),
    Rule("acyclic", "who waits, by counters or in a queue, for itself never begins",
         _few(_acyclic), "order"),
    Rule("made", "what is read has been made", _few(_made), "memory"),
    Rule("ordered", "two accesses, one a write, that nothing orders are a race",
         _few(_ordered), "memory"),
    Rule("kept", "what is made stays until it has been read", _few(_kept), "memory"),
)  # fmt: skip


def check(graph: TaskGraph, stages: Sequence[str] = STAGES) -> list[Violation]:
    """Breaches of the rules; of a graph without queues those that need none."""
    return run(RULES, graph, stages)


def require(graph: TaskGraph) -> TaskGraph:
    """The graph itself, if it breaks no rule; those of memory are asked up to MOST_TASKS.

    Raises  IllegalError: with tasks and the user's lines
    """
    is_small = len(graph.tasks) <= MOST_TASKS
    if violations := check(graph, STAGES if is_small else STAGES[:-1]):
        raise illegal(
            f"Tasks of {graph.program.name}, {graph.schedule or 'unscheduled'}", violations
        )
    return graph
