"""What is recorded as one, and what streams do beside it that wait for tiles.

A stream that waits must come behind the launch that it waits for. Of two streams the host's order
says so; of two branches of one graph nothing does. So such a stream is recorded by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

from weft.base.errors import UsageError
from weft.base.place import UNKNOWN, Place
from weft.ir.device import After, Copy, Step


class Beside(NamedTuple):
    """What one stream does beside the product: what it depends on, and what queues it."""

    stream: str
    key: Hashable
    queue: Callable[[], None]


def run_beside(
    world: Any, replays: Any, streams: Sequence[Beside], join: Any, *, at_once: bool = False
) -> None:
    """Queue what these streams do, all of it before any of it is recorded; `join`, a stream, goes
    on behind them. `at_once`: as of `Replays.run`."""
    if not streams:
        return
    one, *others = streams
    with (copier := world.stream(one.stream)):
        rest = partial(run_beside, world, replays, others, join, at_once=at_once)
        replays.run(one.key, one.queue, rest, at_once=at_once)
    # What is kept may be overwritten again.
    join.wait(copier)


def recordings(
    steps: Sequence[Step], copy_streams: Sequence[str]
) -> tuple[list[Step], dict[str, list[Step]]] | None:
    """A plan's steps that are recorded as one, and those beside them, by the stream that waits for
    tiles: of `copy_streams`. None where the plan has them in another order.

    Such a stream needs nothing but its tokens. It is queued behind all that sets them, and the
    caller goes on when it is done.
    """
    together: list[Step] = []
    beside: dict[str, list[Step]] = {name: [] for name in copy_streams}
    joined: set[str] = set()
    for one in steps:
        if isinstance(one, After) and one.other in beside:
            joined.add(one.other)
        elif joined and not isinstance(one, After):
            return None
        else:
            beside.get(one.stream, together).append(one)
    is_free = all(isinstance(one, Copy) for found in beside.values() for one in found)
    return (together, beside) if is_free and joined == {*beside} else None


def refuse_recording(what: str, remedy: str, place: Place = UNKNOWN) -> UsageError:
    """Of a call that a user records and that names such a transport."""
    return UsageError(
        f"{what} cannot be recorded: an engine's stream waits for tiles, and a graph might begin "
        f"with that wait, not with the product; {remedy}",
        place=place,
    )
