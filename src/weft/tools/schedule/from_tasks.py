"""A program as one kernel on each rank: which worker does which task when, by prediction."""

from __future__ import annotations

from collections.abc import Iterator

from weft.base.hardware import Hardware
from weft.base.schedule import Schedule, Signal, Span
from weft.compiler.cost.tasks import signal_us
from weft.megakernel.predicted import Turn, play
from weft.megakernel.records import TaskGraph


def played(graph: TaskGraph, machine: Hardware) -> Schedule:
    """The queues of a graph, played through. A worker is an SM; a wait ends with the last bump."""
    turns = {turn.task: turn for turn in play(graph, machine)}
    return Schedule([*_spans(graph, turns)], [*_signals(graph, turns, machine)])


def _lane(turn: Turn) -> str:
    return f"sm {turn.worker}"


def _spans(graph: TaskGraph, turns: dict[int, Turn]) -> Iterator[Span]:
    for rank in graph.ranks:
        own = [one for one in turns.values() if graph.tasks[one.task].rank == rank.rank]
        if own:
            end = max(one.end_us for one in own)
            yield Span(rank.rank, "stream main", graph.program.name, 0.0, end, "kernel")
    tasks = graph.tasks
    for turn in turns.values():
        task, lane = tasks[turn.task], _lane(turn)
        if turn.start_us > turn.taken_us:
            waits = ", ".join(f"counter {one.counter} >= {one.at_least}" for one in task.waits)
            yield Span(task.rank, lane, f"{task}: {waits}", turn.taken_us, turn.start_us, "wait")
        yield Span(task.rank, lane, str(task), turn.start_us, turn.end_us, "work", task.owner)


def _signals(graph: TaskGraph, turns: dict[int, Turn], machine: Hardware) -> Iterator[Signal]:
    """Of each counter that a task waits for, the bump that fills it."""
    tasks = graph.tasks
    last: dict[tuple[int, int], tuple[float, Turn]] = {}
    for i, turn in turns.items():
        for bump in tasks[i].bumps:
            at = turn.end_us + signal_us(tasks[i].rank, bump.rank, machine)
            key = (bump.rank, bump.counter)
            last[key] = max(last.get(key, (at, turn)), (at, turn))
    for i, turn in turns.items():
        task = tasks[i]
        for wait in task.waits:
            at, maker = last[task.rank, wait.counter]
            yield Signal(
                f"counter {wait.counter}", tasks[maker.task].rank, _lane(maker), maker.end_us,
                task.rank, _lane(turn), at,
            )  # fmt: skip
