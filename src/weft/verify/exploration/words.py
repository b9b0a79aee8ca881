"""What one step does to a signal word, and which of two steps may change places.

A *step* is what a scheduler decides as one: a program from one synchronising operation to the
next, a host until it blocks, a copy. Only what steps do to words, and who hands what to whom,
makes their order matter: data that two unordered steps share is a race in either order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Who takes steps: ("host", rank), ("stream", rank, number), ("program", rank, launch, id), with one
# number more a partition of it, or, with "completion", the end of what was begun asynchronously.
Process = tuple[object, ...]

# A word: (rank, number of the allocation on its rank, first byte), the same in every run; an
# mbarrier: whose it is, and how many things were named by that one before.
WordKey = tuple[object, ...]

# By word, what a step does to it: "add", "read" (also a wait) or "update"; at an mbarrier "meet",
# or that it arrives in a phase, each phase's being another kind.
Footprint = dict[WordKey, str]


class Access(NamedTuple):
    """One access. `kind`: "add" (nobody gets the old value), "read", "wait", "set", "update", or
    "take": a stream's wait for 1, with the store of 0 that goes with it.

    A wait passes where `seen - expected >= 0`; of a packet, whose flags are compared for equality,
    `expected` is None. At an mbarrier kinds are "arrive", "meet" (a wait by parity) and "disturb"
    (an arrival where there are more than a phase has); `before` is how many phases have ended,
    `expected` of a meeting how many had when it would have gone on too. `hands_on` is the scope of
    a release, empty where it is none; a set that `goes_on` lets whoever sees it know all that who
    saw the word before it knew.
    """

    word: WordKey
    kind: str
    before: int | None = None
    after: int | None = None
    expected: int | None = None
    hands_on: str = ""
    goes_on: bool = False

    @property
    def writes(self) -> bool:
        return self.kind in ("add", "set", "update", "take")

    @property
    def replaces(self) -> bool:
        return self.kind in ("set", "update", "take")

    @property
    def change(self) -> int:
        return (self.after or 0) - (self.before or 0)


def passes(seen: int | None, expected: int | None) -> bool:
    """Would a wait for `expected` pass at `seen`? Of what is not known: no."""
    if seen is None or expected is None:
        return False
    bits = 32 if -(1 << 31) <= min(seen, expected) and max(seen, expected) < 1 << 31 else 64
    return (seen - expected) & ((1 << bits) - 1) < 1 << (bits - 1)


# Kinds of accesses that are to others like another one.
SHOWN_AS = {"wait": "read", "set": "update", "take": "update", "disturb": "update"}


def footprint(accesses: Iterable[Access]) -> Footprint:
    found: Footprint = {}
    for access in accesses:
        kind = SHOWN_AS.get(access.kind, access.kind)
        if kind == "arrive":
            # What ends a phase leaves room for none beside it.
            kind = f"arrive in {access.before}" if access.after == access.before else "update"
        merge(found, {access.word: kind})
    return found


def merge(into: Footprint, other: Footprint) -> None:
    for word, kind in other.items():
        known = into.get(word, kind)
        into[word] = kind if known == kind else "update"


def independent(first: Footprint, second: Footprint) -> bool:
    """May two steps that are next to each other change places without anybody noticing?

    Reads may, and additions of which nobody gets the old value; at an mbarrier meetings, and
    arrivals in one phase.
    """
    if len(first) > len(second):
        first, second = second, first
    for word, kind in first.items():
        other = second.get(word)
        if other is not None and (kind != other or kind == "update"):
            return False
    return True
