"""Which moment of a plan is before which: on one rank, and on every rank.

A step has moments: `begin` and `end`; for each channel that it announces, `announced`: the data
has been written; for each channel that it waits for, `arrived`: the data may be read. A kernel
multiplies some tiles before it waits, and goes on after it has announced others. So `announced` is
not before its other accesses, and `arrived` is not behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Moment(NamedTuple):
    """Of step `step`; `channel` where it is `announced` or `arrived`."""

    step: int
    what: str
    channel: str = ""


class Order:
    """What follows from edges between moments; a far edge holds from every rank to every rank."""

    def __init__(self) -> None:
        self._numbers: dict[Moment, int] = {}
        # By number: what is behind it, as bits; and what is behind it on every rank.
        self._near: list[int] = []
        self._far: list[int] = []

    def _number(self, moment: Moment) -> int:
        if moment not in self._numbers:
            self._numbers[moment] = len(self._near)
            self._near.append(0)
            self._far.append(0)
        return self._numbers[moment]

    def add(self, first: Moment, second: Moment, far: bool = False) -> None:
        """`first` is before `second`."""
        i, j = self._number(first), self._number(second)
        self._near[i] |= 1 << j
        if far:
            self._far[i] |= 1 << j

    def close(self) -> None:
        """Find all that follows: a way with a far edge in it is far."""
        if (behind_first := self._sorted()) is None:
            self._close_cycles()
            return
        near, far = self._near, self._far
        for i in behind_first:
            for j in self._behind(i):
                far[i] |= near[j] if far[i] >> j & 1 else far[j]
                near[i] |= near[j]

    def _behind(self, i: int) -> Iterator[int]:
        """What edges lead to from i."""
        bits = self._near[i]
        while bits:
            lowest = bits & -bits
            yield lowest.bit_length() - 1
            bits ^= lowest

    def _sorted(self) -> list[int] | None:
        """All moments, each behind what comes after it; None where some are before themselves."""
        left = [0] * len(self._near)
        for i in range(len(left)):
            for j in self._behind(i):
                left[j] += 1
        ready = [i for i, count in enumerate(left) if not count]
        for i in ready:
            for j in self._behind(i):
                left[j] -= 1
                if not left[j]:
                    ready.append(j)
        return ready[::-1] if len(ready) == len(left) else None

    def _close_cycles(self) -> None:
        """The same where moments are before themselves: whatever the order of edges."""
        near, far = self._near, self._far
        for k in range(len(near)):
            for i in range(len(near)):
                if near[i] >> k & 1:
                    # The way may go around a cycle at k.
                    far[i] |= near[k] if (far[i] | far[k]) >> k & 1 else far[k]
                    near[i] |= near[k]

    def before(
        self, firsts: Iterable[Moment], seconds: Iterable[Moment], far: bool = False
    ) -> bool:
        """Is one of `firsts` before one of `seconds`, or the same? Nothing is far of itself."""
        table = self._far if far else self._near
        behind = [self._numbers[one] for one in seconds if one in self._numbers]
        for one in firsts:
            i = self._numbers.get(one)
            if i is not None and any(table[i] >> j & 1 or (i == j and not far) for j in behind):
                return True
        return False

    def is_cyclic(self, moment: Moment) -> bool:
        """Is it before itself?"""
        i = self._numbers.get(moment)
        return i is not None and bool(self._near[i] >> i & 1)
