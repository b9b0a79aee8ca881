"""Processes in predicted time: each goes on at a time, or once it has been told of things."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from weft.base.errors import UsageError


class News(NamedTuple):
    """When `key` was there, and who had sent it when: rank, lane, time."""

    key: Hashable
    at_us: float
    sender: tuple[int, str, float]


# It yields the time to go on at, or the keys to wait for; it is sent the time at which it goes on
# and the news that came last, if it waited. What it does first it does at the time it began.
Process = Generator["float | tuple[Hashable, ...]", "tuple[float, News | None]", None]


class Events:
    """Runs processes in the order of their times; the same each time."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Process, tuple[Hashable, ...] | None]] = []
        self._number = count()
        self._news: dict[Hashable, News] = {}
        self._waiting: dict[Hashable, list[tuple[float, Process, tuple[Hashable, ...]]]] = {}

    def start(self, at_us: float, process: Process) -> None:
        """It goes on from its first line at `at_us`."""
        self._push(at_us, process, None)

    def tell(self, key: Hashable, at_us: float, sender: tuple[int, str, float]) -> None:
        """From `at_us` on, which may lie ahead, `key` is there."""
        self._news[key] = News(key, at_us, sender)
        for begun, process, keys in self._waiting.pop(key, ()):
            self._resume(begun, process, keys)

    def run(self) -> None:
        """Raises  UsageError: processes that wait for what nobody tells"""
        while self._queue:
            now, _, process, keys = heappop(self._queue)
            try:
                wanted = next(process) if keys is None else process.send((now, self._last(keys)))
            except StopIteration:
                continue
            if isinstance(wanted, tuple):
                self._resume(now, process, wanted)
            else:
                self._push(wanted, process, ())
        if self._waiting:
            missing = ", ".join(sorted(map(str, self._waiting))[:3])
            raise UsageError(f"the plan never ends: somebody waits for {missing}")

    def _last(self, keys: Iterable[Hashable]) -> News | None:
        return max((self._news[key] for key in keys), key=lambda news: news.at_us, default=None)

    def _push(self, at_us: float, process: Process, keys: tuple[Hashable, ...] | None) -> None:
        heappush(self._queue, (at_us, next(self._number), process, keys))

    def _resume(self, begun: float, process: Process, keys: Iterable[Hashable]) -> None:
        keys = tuple(keys)
        for key in keys:
            if key not in self._news:
                self._waiting.setdefault(key, []).append((begun, process, keys))
                return
        at = max((self._news[key].at_us for key in keys), default=begun)
        self._push(max(begun, at), process, keys)
