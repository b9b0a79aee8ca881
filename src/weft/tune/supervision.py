"""A benchmark from outside: what hangs or kills its process is left out, and the rest goes on.

The ranks are started once for all points. Where rank 0 is silent for too long, or a process dies,
they are started again without the variant that was running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from weft.base.card import Op
from weft.base.errors import UsageError
from weft.tune.bench import Message, Plan, bench_rank
from weft.tune.processes import RanksStopped, messages_from_gpus
from weft.tune.rows import failure_row

# Compiling a rival's kernels, and one large point's inputs, are the longest silences there are.
SILENCE_S = 60.0
# A variant that hung or crashed at so many points is not tried at the others.
PATIENCE = 2

Start = Callable[[Plan], Iterator[Message]]


def start_on_gpus(card_of: Callable[[str], Op]) -> Start:
    """What starts the ranks of a plan and yields what they say."""

    def start(plan: Plan) -> Iterator[Message]:
        return messages_from_gpus(
            bench_rank, plan.num_ranks, card_of, plan, silence_s=SILENCE_S
        )  # fmt: skip

    return start


def supervised(plan: Plan, start: Start) -> Iterator[Message]:
    """Everything of a plan; yields "started", "at", "row", "failed", "measured", "clocks",
    "skipped".

    What hangs or kills its process becomes a "failed", and the rest goes on in new processes.

    Raises  UsageError: two points of one name; modes of one are one point's
    """
    left_out: dict[tuple[str, str], str] = dict(plan.left_out)
    done: set[tuple[str, str]] = set(plan.done)
    points = {point.name: point for point in plan.points}
    if len(points) < len(plan.points):
        names = Counter(point.name for point in plan.points)
        twice = next(name for name, count in names.items() if count > 1)
        raise UsageError(
            f"{names[twice]} points are called {twice!r}; give one point all of its modes, and "
            "points that differ in something else labels of their own"
        )
    ended: set[str] = set()
    stumbles: dict[str, int] = {}
    while True:
        remaining = tuple(point for name, point in points.items() if name not in ended)
        if not remaining:
            return
        current = replace(plan, points=remaining, left_out=left_out, done=frozenset(done))
        at, why = {"point": "", "variant": ""}, ""
        try:
            for word, values in start(current):
                if word == "at":
                    if at["point"] and values["point"] != at["point"]:
                        ended.add(at["point"])
                    at = values
                elif word == "measured":
                    done.add((values["point"], values["mode"]))
                elif word == "skipped":
                    ended.add(values["point"])
                elif word == "fatal":
                    why = values["error"]
                    continue
                elif word == "finished":
                    ended.update(points)
                    continue
                yield word, values
            return
        except RanksStopped as stopped:
            point, name = points.get(at["point"]), at["variant"]
            why = why or stopped.message
            if point is None:  # they did not even start: nor would they again
                raise
            if not name or (point.name, name) in left_out:
                ended.add(point.name)
            left_out[point.name, name] = why
            stumbles[name] = stumbles.get(name, 0) + 1
            if name and stumbles[name] >= PATIENCE:
                left_out["", name] = why
            yield "failed", failure_row(point, name, None, why)
