"""The scheduler: exactly one task of a machine runs at a time, and a chooser says which.

A task is a host (a thread per rank), a program (a coroutine), or the start of a stream's next work.
Host code runs until it waits; device code until it synchronises. `Waiters` are those that were set
aside until a signal word changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from greenlet import getcurrent

from weft.base.place import Place
from weft.emulator.choices import Chooser
from weft.emulator.memory import Allocation


@dataclass
class Waiting:
    """What a program that was set aside waits for; `expected` is None for a raw spin.

    Of a packet `expected` and `seen` are flags.
    """

    allocation: Allocation
    cell: int
    index: Any
    place: Place
    expected: int | None
    seen: int
    is_packet: bool = False


class Task(Protocol):
    """What the scheduler lets run: a program, a rank's host, the start of a stream's next work.

    While an explored machine need not let it go on, `blocked()` holds.
    """

    blocked: Callable[[], bool] | None

    @property
    def rank(self) -> int: ...

    def step(self) -> None: ...


class Waiter(Protocol):
    """A program, or a stream's token, that waits for a signal word."""

    waiting: Waiting | None

    def wake(self) -> None:
        """The word has changed: look at it again."""


class NoEnd(Exception):
    """A session took more steps than its rewrite allows."""


class Scheduler:
    """The tasks that can go on, and the one that runs.

    `progress` changes whenever something happens that somebody may wait for. While
    `hosts_may_go`, hosts are to look again at what they wait for.

    Units   steps: choices, and points at which there was none
    """

    def __init__(self, chooser: Chooser, is_over: Callable[[], bool]) -> None:
        self.chooser = chooser
        self.explores = chooser.explores
        self.is_over = is_over
        self.wake_hosts: Callable[[], None] = lambda: None
        self.ready: list[Task] = []
        self.running: Any = None
        self.hub = getcurrent()  # where programs return to
        self.hosts_may_go = False
        self.progress = 0
        self.steps = 0
        self.most_steps = math.inf

    def take_turns(self) -> bool:
        """Let tasks run until none is ready or the chooser takes none of them; True if `is_over`.

        Raises  NoEnd: after `most_steps`
        """
        ready, pick, most_steps = self.ready, self.chooser.pick, self.most_steps
        while ready:
            place = pick(ready)
            if place < 0:
                break
            task = ready[place]
            ready[place] = ready[-1]
            ready.pop()
            self.running = task
            self.steps += 1
            if self.steps > most_steps:
                raise NoEnd(f"no end after {self.steps} steps")
            task.step()
            if self.is_over():
                return True
            if self.hosts_may_go:
                self.wake_hosts()
        return False

    def try_blocked(self) -> None:
        """Nobody in an explored machine would get on: let the waits be seen to wait."""
        blocked = [task for task in self.ready if task.blocked is not None]
        self.ready[:] = [task for task in self.ready if task.blocked is None]
        for task in blocked:
            task.step()

    def make_ready(self, task: Task) -> None:
        self.ready.append(task)

    def preempts(self) -> bool:
        """Is another task to be chosen now? Without another one, `take_turns` sees the end."""
        self.steps += 1
        if self.explores or self.steps > self.most_steps:
            return True
        return bool(self.ready) and self.chooser.preempts()

    def host_changed(self) -> None:
        """Something has happened that hosts may be waiting for."""
        self.progress += 1
        self.hosts_may_go = True


# A tile of atomics on more words than these adds up data: watches hear of none of them.
SIGNALS_IN_A_TILE = 64
# So many lines that signal one word are remembered.
PLACES_KEPT = 4


class Waiters:
    """Those that were set aside until a signal word changes, by word.

    `signallers` are lines that have signalled, by the tensor's name and the word's cell.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.signallers: dict[tuple[str, int], set[Place]] = {}
        # A dict for its order, and because a stream looks at its token more than once.
        self._waiters: dict[tuple[int, int], dict[Waiter, None]] = {}

    def add(self, waiter: Waiter) -> None:
        """Wake `waiter` when the word that it waits for changes."""
        waiting = waiter.waiting
        assert waiting is not None
        waiting.allocation.sync_word(waiting.cell)
        self._waiters.setdefault((id(waiting.allocation), waiting.cell), {})[waiter] = None

    def word_changed(self, allocation: Allocation, cell: int, place: Place | None = None) -> None:
        """A signal word has a new value, signalled at `place`: whoever waits for it looks again."""
        self.scheduler.progress += 1
        if place is not None:
            key = (allocation.name, cell)
            places = self.signallers.get(key)
            if places is None:
                places = self.signallers[key] = set()
            if len(places) < PLACES_KEPT:
                places.add(place)
        waiters = self._waiters.pop((id(allocation), cell), None)
        if waiters:
            _wake(waiters)

    def words_changed(self, allocation: Allocation, cells: list[int], place: Place) -> None:
        """The same for a tile of words; a large one is data, and nobody's signal."""
        self.scheduler.progress += 1
        if len(cells) <= SIGNALS_IN_A_TILE:
            for cell in cells:
                self.word_changed(allocation, cell, place)
        elif self._waiters:
            for cell in cells:
                _wake(self._waiters.pop((id(allocation), cell), ()))

    def wake_spins(self) -> bool:
        """Let all that spin look again: they may wait for something else than the word that they
        looked at last. Says whether there were any."""
        woken = False
        for key, waiters in list(self._waiters.items()):
            spinning = [one for one in waiters if one.waiting.expected is None]
            if spinning:
                woken = True
                _wake(spinning)
                rest = {one: None for one in waiters if one.waiting.expected is not None}
                if rest:
                    self._waiters[key] = rest
                else:
                    del self._waiters[key]
        return woken

    def all(self) -> list[Waiter]:
        return [waiter for waiters in self._waiters.values() for waiter in waiters]

    def clear(self) -> None:
        self._waiters.clear()


def _wake(waiters: Iterable[Waiter]) -> None:
    for waiter in waiters:
        waiter.wake()
