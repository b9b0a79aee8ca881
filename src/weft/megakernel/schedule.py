"""Which worker runs which task when: queues of every rank from one order of all ranks' tasks.

    round_robin    in the order of the program, dealt to workers by turns
    balanced       list scheduling: a free worker takes, of what is ready, the task with the
                   longest way to the end behind it, by predicted times; queues are what came out
    dynamic        one queue in the order in which `balanced` has them begin; workers take the next

Whatever the schedule, queues are taken from one order of all ranks' tasks in which every task comes
behind all that it needs. So the first task in it that is not done has all that it needs, and those
before it in its own queue are done: its worker is at it. It ends, and so on: there is no deadlock.
Where workers take the next task, one worker is enough. `check.py` shows it again, of queues alone.
"""

from __future__ import annotations

from dataclasses import replace

from weft.base.errors import ConfigError
from weft.base.hardware import H200X4, Hardware
from weft.megakernel.predicted import predict
from weft.megakernel.records import SCHEDULES, TaskGraph


def schedule(
    graph: TaskGraph, how: str = "balanced", num_workers: int = 132, machine: Hardware = H200X4
) -> TaskGraph:
    """The graph with queues.

    Raises  ConfigError: a schedule that there is not; no worker
    """
    if how not in SCHEDULES or num_workers < 1:
        message = f"schedule={how!r} for {num_workers} workers; it is {' or '.join(SCHEDULES)}"
        raise ConfigError(
            f"{graph.program.name}: {message}, for 1 or more", place=graph.program.place
        )
    count = 1 if how == "dynamic" else num_workers
    queues: list[list[list[int]]] = [[[] for _ in range(count)] for _ in graph.ranks]
    if how == "round_robin":
        for rank in graph.ranks:
            for task in rank.tasks:
                queues[rank.rank][task.id % num_workers].append(task.id)
    else:
        for turn in predict(graph, num_workers, machine):
            task = graph.tasks[turn.task]
            queues[task.rank][turn.worker % count].append(task.id)
    ranks = tuple(
        replace(rank, queues=tuple(map(tuple, own))) for rank, own in zip(graph.ranks, queues)
    )
    return replace(graph, ranks=ranks, schedule=how, num_workers=num_workers)
