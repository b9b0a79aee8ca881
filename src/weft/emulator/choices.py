"""The choices that a machine leaves open: which task runs next, which is preempted, which value
an atomic load sees.

A schedule is a list of such decisions. `Seeded` draws them from a seed; the explorer of `verify/`
goes through them one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from weft.emulator.memory import Allocation, SyncWord

# How often a program lets another one go first at a synchronising operation.
PREEMPTION = 0.3


class Chooser(Protocol):
    """Answers every choice of one machine.

    With `explores` a program gives way before each synchronising operation, a wait that would not
    pass is no step at all, and streams start in whatever order their starts are picked.
    """

    explores: bool

    def pick(self, ready: list[Any]) -> int:
        """The place in `ready` of the task that runs next; the list is not empty."""
        ...

    def preempts(self) -> bool:
        """Does a program that could go on let another one go first?"""
        ...

    def choose(self, options: int, what: str) -> int:
        """One of `options` ways to go on, 0 being the usual one; asked where there are several."""
        ...


class Sight:
    """A chooser that also says which value of a signal word somebody sees."""

    def seen(
        self, by: Any, allocation: Allocation, cell: int, newest: Any, word: SyncWord,
        suits: Callable[[Any], bool] = lambda value: True,
    ) -> tuple[Any, SyncWord]:  # fmt: skip
        """(a value that `suits`, what was published with it) for an atomic look at `cell`."""
        return newest, word


class Seeded:
    """Every choice from a seed: the same seed is the same run."""

    explores = False

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._draw = random.Random(seed).random

    def pick(self, ready: list[Any]) -> int:
        return int(self._draw() * len(ready))

    def preempts(self) -> bool:
        return self._draw() < PREEMPTION

    def choose(self, options: int, what: str) -> int:
        return 0
