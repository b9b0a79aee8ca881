"""What the parts of a machine ask of each other, and the record of a wait.

The scheduler, the waiters and the observers are below what they deal with: programs, hosts and
streams. They know these by protocols alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from weft.base.place import Place
from weft.emulator.clocks import Clock
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


class Accessor(Protocol):
    """Accesses memory: a program, or an actor of a work or a host (`work` is then None)."""

    agent: int
    clk: int
    clock: Clock
    work: Any

    @property
    def rank(self) -> int: ...

    def owns(self, segment: int) -> bool: ...
