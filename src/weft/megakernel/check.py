"""What holds of every graph, shown again from the records alone.

A table of rules that is run, as for the levels of the IR; each names tasks and the user's lines.
That there is no deadlock follows from two of them. Let all ranks' tasks be ordered by their waits
and by the order in which each worker does its own, and let that have no cycle (`acyclic`). Then
there is one order of all tasks in which each comes behind whatever it waits for, and behind its
worker's before it. Of the tasks that are not done take the first. All that it waits for is done, so
its counters are full: a wait asks for what is bumped (`counted`). Its worker has done all before
it, and is at it. It ends, and there is one less.

Memory is right if of two accesses to one byte, one of them a write, one is over before the other
begins (`ordered`), who reads a value comes behind those who make it (`made`), and nobody writes
another value there in between (`kept`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import islice, product
from math import prod
from typing import NamedTuple

from weft.base.place import Place
from weft.compiler.passes.tile import Region
from weft.ir.legality import Rule, Violation, legal, run
from weft.megakernel.memory import span_of
from weft.megakernel.records import GIVEN, ROLES, Access, TaskGraph, TileTask

# Of one rule; a wrong rule of the compiler would name each task.
MOST_BREACHES = 8
# All pairs of accesses to the same bytes are looked at: seconds from some thousands of tasks on.
MOST_TASKS = 2000
STAGES = ("signals", "order", "memory")
Breaches = Iterator[tuple[str, Place]]


class Order:
    """What is before each task, as bits of tasks by their number among all ranks'.

    There must be no cycle.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self.tasks = graph.tasks
        self.before = [0] * len(self.tasks)
        behind = of_worker_before(graph)
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
    """Tasks by number, and counters between them, each behind whom it needs; `behind` is what its
    worker does before a task. Or nothing, and tasks of which each is before the next, the last
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


def of_worker_before(graph: TaskGraph) -> dict[int, int]:
    """Of each task the one that its worker does before, by numbers among all ranks'."""
    first, found = 0, {}
    for rank in graph.ranks:
        end = first + len(rank.tasks)
        found |= {i: i - graph.num_workers for i in range(first + graph.num_workers, end)}
        first = end
    return found


def _at(graph: TaskGraph, task: TileTask | None, message: str) -> tuple[str, Place]:
    """A breach, at the user's line of a task."""
    return message, graph.program.task(task.op).place if task else graph.program.place


def _counted(graph: TaskGraph) -> Breaches:
    given: Counter[tuple[int, int]] = Counter()
    counters = {rank.rank: len(rank.counters) for rank in graph.ranks}
    for task in graph.tasks:
        for one in task.bumps:
            given[one.rank, one.counter] += one.amount
            if one.amount < 1 or not 0 <= one.counter < counters.get(one.rank, 0):
                message = f"rank {one.rank} of {graph.num_ranks} has {counters.get(one.rank, 0)}"
                yield _at(graph, task, f"{task} bumps {one}, but {message} counters")
    for rank in graph.ranks:
        for counter, total in enumerate(rank.counters):
            if given[rank.rank, counter] != total:
                makers = [task for task in graph.tasks if _bumps(task, rank.rank, counter)]
                waiting = [task for task in rank.tasks
                           if any(one.counter == counter for one in task.waits)]  # fmt: skip
                by = ", ".join(map(str, makers[:3])) + ", ..." * (len(makers) > 3) or "nobody"
                message = f"counter {counter} of rank {rank.rank} is said to come to {total}"
                message += f", but is bumped by {given[rank.rank, counter]}: {by}"
                yield _at(graph, next(iter([*waiting, *makers]), None), message)
    for task in graph.tasks:
        for one in task.waits:
            total = given[task.rank, one.counter]
            if one.at_least != total:
                message = f"{task} waits until counter {one.counter} has come to {one.at_least}"
                yield _at(graph, task, f"{message}, but all bumps of it are {total}")


def _bumps(task: TileTask, rank: int, counter: int) -> bool:
    return any((one.rank, one.counter) == (rank, counter) for one in task.bumps)


def _awaited(graph: TaskGraph) -> Breaches:
    waited = {(task.rank, one.counter) for task in graph.tasks for one in task.waits}
    for task in graph.tasks:
        for one in task.bumps:
            if (one.rank, one.counter) not in waited:
                message = f"{task} bumps counter {one.counter} of rank {one.rank}"
                yield _at(graph, task, f"{message}, for which nobody waits")


def _acyclic(graph: TaskGraph) -> Breaches:
    cycle = [graph.tasks[i] for i in in_order(graph.tasks, of_worker_before(graph))[1]]
    if cycle:
        pairs = zip([cycle[-1], *cycle], cycle)
        message = ", ".join(_why(graph, earlier, later) for earlier, later in pairs)
        yield _at(graph, cycle[0], f"nobody can begin: {message}")


def _why(graph: TaskGraph, earlier: TileTask, later: TileTask) -> str:
    if any(_bumps(earlier, later.rank, wait.counter) for wait in later.waits):
        return f"{later} waits for {earlier}"
    return f"{later} is behind {earlier} of worker {later.id % graph.num_workers}"


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
    for (_, memory), alike in found.items():
        if memory in ROLES or any(is_write for is_write, _ in alike):
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
    order = Order(graph)
    reported: set[tuple[int, int]] = set()
    for one, other in conflicts(graph):
        if order.are_before(one, other) or order.are_before(other, one):
            continue
        for i, j in product(one.numbers, other.numbers):
            if i == j or (i, j) in reported or order.is_before(i, j) or order.is_before(j, i):
                continue
            reported.update(((i, j), (j, i)))
            message = f"{_does(graph, one, i)} and {_does(graph, other, j)}, in the same bytes"
            message += f" of rank {one.access.rank}, and neither waits for the other"
            yield _at(graph, graph.tasks[max(i, j)], message)


def _does(graph: TaskGraph, touch: Touch, number: int) -> str:
    rows = f"{touch.access.region.first_row} to {touch.access.region.end_row - 1}"
    what = f"{'writes' if touch.is_write else 'reads'} {touch.access.buffer} rows {rows}"
    return f"{graph.tasks[number]} {what}"


def _is_given(graph: TaskGraph, access: Access) -> bool:
    return graph.ranks[access.rank].buffer(access.buffer).role == "input"


def _made(graph: TaskGraph) -> Breaches:
    """Each element that is read has been written once, by a task before."""
    order, tasks = Order(graph), graph.tasks
    made: dict[Touch, int] = {}
    for pair in conflicts(graph):
        access = pair[0].access
        if access.buffer != pair[1].access.buffer or _is_given(graph, access):
            continue
        if pair[0].is_write and pair[1].is_write:
            first, second = (tasks[touch.numbers[-1]] for touch in pair)
            message = f"{first} and {second} both make elements of {access.buffer}"
            yield _at(graph, first, f"{message} on rank {access.rank}")
            continue
        write, read = pair if pair[0].is_write else pair[::-1]
        made[read] = made.get(read, 0) + _cells(write.access.region.within(read.access.region))
        for i, j in product(write.numbers, read.numbers):
            if not order.is_before(i, j):
                message = f"{tasks[j]} reads {access.buffer}, and does not wait for {tasks[i]}"
                yield _at(graph, tasks[j], f"{message}, which makes it")
    for touch in (one for touches in _memories(graph) for one in touches if not one.is_write):
        cells, task = _cells(touch.access.region), tasks[touch.numbers[0]]
        if made.get(touch, 0) < cells and not _is_given(graph, touch.access):
            message = f"of the {cells} elements of {touch.access.buffer} that {task} reads"
            yield _at(graph, task, f"{message} {made.get(touch, 0)} are made")


def _cells(region: Region) -> int:
    return 0 if region.is_empty else prod(region.extents)


def _kept(graph: TaskGraph) -> Breaches:
    """Of two buffers in the same bytes one is over before the other begins."""
    order = Order(graph)
    earlier: dict[tuple[int, frozenset[str]], tuple[Touch, Touch]] = {}
    for pair in conflicts(graph):
        if pair[0].access.buffer == pair[1].access.buffer:
            continue
        first, second = pair if order.are_before(*pair) else pair[::-1]
        names = frozenset(one.access.buffer for one in pair)
        known = earlier.setdefault((first.access.rank, names), (first, second))
        is_ordered = order.are_before(first, second)
        if is_ordered and known[0].access.buffer == first.access.buffer:
            continue
        words = [[_does(graph, one, one.numbers[0]) for one in both]
                 for both in (known, (first, second))]  # fmt: skip
        message = f"{' and '.join(words[1])}, in the same bytes: neither buffer is over before"
        message += " the other begins"
        if is_ordered:
            message = f"{' before '.join(words[0])}, but {' before '.join(words[1])}, in its bytes"
        last = graph.tasks[second.numbers[0]]
        yield _at(graph, last, f"on rank {first.access.rank} {message}")


def _few(rule: Callable[[TaskGraph], Breaches]) -> Callable[[TaskGraph], Breaches]:
    return lambda graph: islice(rule(graph), MOST_BREACHES)


RULES = (
    Rule("counted", "a wait for more than comes never ends, for less may end too early",
         _few(_counted), "signals"),
    Rule("awaited", "a bump that nobody waits for is a waste", _few(_awaited), "signals"),
    Rule("acyclic", "who waits, by counters or for its worker, for itself never begins",
         _few(_acyclic), "order"),
    Rule("made", "what is read has been made", _few(_made), "memory"),
    Rule("ordered", "two accesses, one a write, that nothing orders are a race",
         _few(_ordered), "memory"),
    Rule("kept", "what is made stays until it has been read", _few(_kept), "memory"),
)  # fmt: skip


def check(graph: TaskGraph, stages: Sequence[str] = STAGES) -> list[Violation]:
    """Breaches of the rules of these stages."""
    return run(RULES, graph, stages)


def require(graph: TaskGraph) -> TaskGraph:
    """The graph itself, if it breaks no rule; those of memory are asked up to MOST_TASKS.

    Raises  IllegalError: with tasks and the user's lines
    """
    is_small = len(graph.tasks) <= MOST_TASKS
    found = check(graph, STAGES if is_small else STAGES[:-1])
    return legal(f"Tasks of {graph.program.name}", graph, found)
