"""Which values of a signal word somebody may see: the newest, or an older one that is still legal.

The emulator changes words one after the other and shows everybody the newest value. Hardware may
show an older one: a relaxed store that travels, a load that was served early. Of a word's values in
the order in which they were stored, one may see any that is not older than what happens-before
forbids: the last store that one knows of, and the last value that somebody whom one knows of has
seen. Updates always see the newest.

An older value is offered only where the order of steps alone could not show it: where the next
store lies in the past of the steps, but nothing has told its reader.

What is not explored: stores of one program to several words that take effect in the opposite
order for the stores of another one (2+2W), and loads that see stores which depend on them (LB).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weft.emulator.memory import SyncWord

if TYPE_CHECKING:
    from weft.verify.exploration.partial_order import Trace
    from weft.verify.exploration.words import WordKey


@dataclass(slots=True)
class _Value:
    """One value of a word: who stored it (agent and its clock), in which step, and how."""

    value: int
    published: SyncWord
    agent: int = -1
    clock: int = 0
    step: int = -1
    is_add: bool = False


@dataclass(slots=True)
class _History:
    """`looks`: who (agent, clock) has seen which value (index)."""

    values: list[_Value]
    looks: list[tuple[int, int, int]] = field(default_factory=list)


class Visibility:
    """All words of one execution. `unordered` are words of which several additions were in sight:
    which of them are seen together depends on their order, so that they do not commute."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.unordered: set[WordKey] = set()
        self._words: dict[WordKey, _History] = {}

    def stored(
        self, word: WordKey, by: Any, before: int | None, after: int, published: SyncWord,
        how: str, releases: bool,
    ) -> None:  # fmt: skip
        """`by` has changed the word; a release has moved its clock on already."""
        if before is None:
            return
        history = self._words.get(word)
        if history is None or history.values[-1].value != before:
            # What a plain store left is ordered like data: there is nothing older to see.
            history = self._words[word] = _History([_Value(before, SyncWord())])
        clock = by.clk - 1 if releases else by.clk
        copy = SyncWord(dict(published.published))
        history.values.append(
            _Value(after, copy, by.agent, clock, len(self.trace.steps) - 1, how == "add")
        )

    def look(
        self, word: WordKey, by: Any, newest: int, published: SyncWord,
        suits: Callable[[int], bool], choose: Callable[[int], int],
    ) -> tuple[int, SyncWord]:  # fmt: skip
        """(value, what it publishes) of one that `by` may see and that `suits`."""
        history = self._words.get(word)
        if history is None or history.values[-1].value != newest:
            return newest, published
        values = history.values
        last = len(values) - 1
        options = [last]
        step = self.trace.current
        if step is not None:
            for k in range(last - 1, self._oldest(history, by) - 1, -1):
                follows = values[k + 1]
                if follows.step >= 0 and self.trace.is_past(follows.step, step.past):
                    if suits(values[k].value):
                        options.append(k)
        if sum(values[k + 1].is_add for k in options[1:]) > 1:
            self.unordered.add(word)
        taken = options[choose(len(options)) if len(options) > 1 else 0]
        history.looks.append((by.agent, by.clk, taken))
        if taken == last:
            return newest, published
        return values[taken].value, values[taken].published

    def _oldest(self, history: _History, by: Any) -> int:
        """The first value that `by` may still see."""
        oldest = 0
        for k, value in enumerate(history.values):
            if value.agent >= 0 and by.knows(value.agent, value.clock):
                oldest = k
        for agent, clock, k in history.looks:
            if k > oldest and by.knows(agent, clock):
                oldest = k
        return oldest
