"""When something that serves one user at a time is free: engines and links of simulated time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class Calendar:
    """The times at which one thing is taken: disjoint spans, in order."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def earliest(self, ready: float, duration: float) -> float:
        """The first time from `ready` on at which it is free for `duration`."""
        if duration <= 0:
            return ready
        place = bisect_right(self.ends, ready)
        while place < len(self.starts) and self.starts[place] < ready + duration:
            ready = max(ready, self.ends[place])
            place += 1
        return ready

    def take(self, start: float, end: float) -> None:
        """Take it from `start` to `end`, which must be free."""
        if end <= start:
            return
        place = bisect_right(self.starts, start)
        if place and self.ends[place - 1] == start:
            place -= 1
            self.ends[place] = end
        else:
            self.starts.insert(place, start)
            self.ends.insert(place, end)
        if place + 1 < len(self.starts) and self.starts[place + 1] == end:
            self.ends[place] = self.ends.pop(place + 1)
            del self.starts[place + 1]


# What one use takes: (of what, how long after its start, for how long).
Need = tuple[Calendar, float, float]


def earliest_for_all(ready: float, needs: Sequence[Need]) -> float:
    """The first start at which every need is free."""
    while True:
        start = ready
        for calendar, offset, duration in needs:
            start = max(start, calendar.earliest(start + offset, duration) - offset)
        if start <= ready:
            return ready
        ready = start


def take_all(start: float, needs: Sequence[Need]) -> None:
    for calendar, offset, duration in needs:
        calendar.take(start + offset, start + offset + duration)
