"""The last values of a signal word, and which of them a wait must count with.

The emulator changes words one after the other. A wait that ends when the word holds 5 may have
waited for 3 alone: it returns no value, so it may as well have ended when 3 was stored, with what
had been published by then. To learn all that the newest value stands for would hide races: those of
a program that waits for less than it needs. So a wait learns what the oldest value tells that was
enough, and that happens-before lets it see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Values of one word, and looks at them, that are kept. Where more are needed, waits learn more.
MOST_VALUES = 64
MOST_LOOKS = 256


class _Value:
    """Who stored it (agent and its clock), and what the word told while it was the newest."""

    __slots__ = ("agent", "clock", "published", "value")

    def __init__(self, value: Any, agent: int, clock: int) -> None:
        self.value, self.agent, self.clock = value, agent, clock
        self.published: dict = {}


class WordValues:
    """Of one word, in the order in which they were stored, numbered from the first one on."""

    __slots__ = ("_first", "_looks", "_values")

    def __init__(self) -> None:
        self._values: list[_Value] = []
        self._first = 0
        # Who has seen which value, and when first: (agent, number) -> the agent's clock.
        self._looks: dict[tuple[int, int], int] = {}

    def forget(self) -> None:
        self._values.clear()
        self._looks.clear()

    def stored(self, by: Any, before: Any, after: Any, published: dict) -> None:
        """`by` changes the word, of which `published` is what it has told up to now."""
        values = self._values
        if not values or values[-1].value != before:
            self.forget()
            values.append(_Value(before, -1, 0))
        values[-1].published = dict(published)
        values.append(_Value(after, by.agent, by.clk))
        if len(values) > MOST_VALUES:
            self._first += MOST_VALUES // 2
            del values[: MOST_VALUES // 2]
            looks = self._looks.items()
            self._looks = {look: clock for look, clock in looks if look[1] > self._first}

    def looked(self, by: Any, seen: Any) -> None:
        """`by` has read the newest value: it sees no older one later."""
        if self._values and self._values[-1].value == seen:
            self._note(by, len(self._values) - 1)

    def _note(self, by: Any, index: int) -> None:
        self._looks.setdefault((by.agent, self._first + index), by.clk)
        if len(self._looks) > MOST_LOOKS:
            self.forget()

    def told(self, by: Any, newest: Any, published: dict, suits: Callable[[Any], bool]) -> dict:
        """What a wait of `by` learns, which `newest` suits; `published`: what it tells now."""
        values = self._values
        if not values or values[-1].value != newest:
            return published
        last = len(values) - 1
        oldest = max((k for k, one in enumerate(values) if k and by.knows(one.agent, one.clock)),
                     default=0)  # fmt: skip
        for (agent, number), clock in self._looks.items():
            if number - self._first > oldest and by.knows(agent, clock):
                oldest = number - self._first
        seen = last
        while seen > oldest and suits(values[seen - 1].value):
            seen -= 1
        self._note(by, seen)
        return published if seen == last else values[seen].published
