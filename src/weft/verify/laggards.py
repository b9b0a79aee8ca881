"""Schedules in which somebody is late: what a uniform draw takes thousands of seeds to show.

A uniform schedule keeps everybody about equally far. But an engine that copies a word long after
its rank has gone on, or a rank that is a whole call behind, is what credits and last waits are for.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from weft.emulator.choices import Chooser, Seeded

# How many picks somebody lags for, on average.
PICKS = 150


class Laggards(Seeded):
    """A seed's schedule in which one party at a time runs only if nobody else can.

    A party is the host of a rank, its programs, or one of its streams. Who lags, and for how long,
    is drawn as well.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._late: Hashable = None
        self._left = 0
        self._parties: dict[Hashable, None] = {}  # in the order in which they were first seen

    def pick(self, ready: list[Any]) -> int:
        parties = [party_of(task) for task in ready]
        self._parties.update(dict.fromkeys(parties))
        if self._left <= 0:
            # Of all parties alike: programs are many, a stream is one.
            known = list(self._parties)
            self._late = known[super().pick(known)]
            self._left = int(2 * PICKS * self._draw())
        self._left -= 1
        others = [i for i, party in enumerate(parties) if party != self._late]
        return others[super().pick(others)] if others else super().pick(ready)


def party_of(task: Any) -> Hashable:
    """Whose turn `task` is: (rank, its stream's name), or (rank, what it is)."""
    stream = getattr(task, "stream", None)
    if stream is not None:
        return stream.rank, stream.name
    return task.rank, type(task).__name__


def chooser_of(seed: int) -> Chooser | None:
    """Even seeds are uniform draws, as the session makes them; odd ones have laggards."""
    return Laggards(seed) if seed % 2 else None
