"""The scheduler: exactly one task of a machine runs at a time, and a chooser says which.

A task is a host (a thread per rank), a program (a coroutine), or the start of a stream's next work.
Host code runs until it waits; device code until it synchronises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent

from weft.emulator.choices import Chooser
from weft.emulator.protocols import Task


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
