"""A program as one kernel on each rank: which worker does which task when, by prediction."""

from __future__ import annotations

from weft.base.hardware import Hardware
from weft.base.schedule import Schedule, Signal, Span
from weft.compiler.cost.tasks import signal_us
from weft.megakernel.predicted import Turn, play
from weft.megakernel.records import TaskGraph


def played(graph: TaskGraph, machine: Hardware) -> Schedule:
    """The queues of a graph, played through. A worker is an SM; a wait ends with the last bump."""
    tasks, turns = graph.tasks, {turn.task: turn for turn in play(graph, machine)}
    spans, signals = [], []
    last: dict[tuple[int, int], tuple[float, Turn]] = {}
    for turn in turns.values():
        task = tasks[turn.task]
        for bump in task.bumps:
            at = turn.end_us + signal_us(task.rank, bump.rank, machine)
            key = (bump.rank, bump.counter)
            last[key] = max(last.get(key, (at, turn)), (at, turn))
    for turn in turns.values():
        task, lane = tasks[turn.task], f"sm {turn.worker}"
        if turn.start_us > turn.taken_us:
            waits = ", ".join(f"counter {one.counter} >= {one.at_least}" for one in task.waits)
            name = f"{task}: {waits}"
            spans.append(Span(task.rank, lane, name, turn.taken_us, turn.start_us, "wait"))
        spans.append(
            Span(task.rank, lane, str(task), turn.start_us, turn.end_us, "work", task.owner)
        )
        for wait in task.waits:
            at, maker = last[task.rank, wait.counter]
            sender = (tasks[maker.task].rank, f"sm {maker.worker}", maker.end_us)
            signals.append(Signal(f"counter {wait.counter}", *sender, task.rank, lane, at))
    for rank in range(graph.num_ranks):
        end = max((one.end_us for one in spans if one.rank == rank), default=0.0)
        if end:
            name = graph.program.name
            spans.append(Span(rank, "stream main", name, 0.0, end, "kernel"))
    return Schedule(spans, signals)
