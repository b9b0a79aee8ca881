"""Steps that all ranks of a world take alike, and how two that differ are told.

A step is (number, kind, what belongs to it ..): an allocation, a free, a further segment of the
heap, the world's end; or several allocations that ranks meet for once.
"""

from __future__ import annotations

from itertools import zip_longest

ALLOCATIONS = "allocations"
NOTHING = ("nothing more",)


def difference(world: str, one: tuple[int, tuple], other: tuple[int, tuple]) -> str:
    """Of two ranks, each with its step."""
    (rank, mine), (peer, theirs) = one, other
    number = mine[0]
    mine, theirs = _unlike(mine, theirs)
    return (
        f"collective step {number} on world {world!r}: rank {rank} has {_described(mine)}, but "
        f"rank {peer} has {_described(theirs)}"
    )


def _unlike(mine: tuple, theirs: tuple) -> tuple[tuple, tuple]:
    """Of two that are several allocations each, the first that differ."""
    if mine[1] == theirs[1] == ALLOCATIONS:
        pairs = zip_longest(mine[2:], theirs[2:], fillvalue=NOTHING)
        ours, others = next((pair for pair in pairs if pair[0] != pair[1]), (NOTHING, NOTHING))
        return (mine[0], *ours), (theirs[0], *others)
    return mine, theirs


def _described(step: tuple) -> str:
    number, kind, *rest = step
    if kind == ALLOCATIONS:  # of a slot, which has words at least
        return f"{_described((number, *rest[0]))} and {len(rest) - 1} more"
    if kind in ("tensor", "signals"):
        offset, dtype, shape, label = rest
        return f"{kind} {label!r} {dtype}{list(shape)} at offset {offset}"
    if kind == "free":
        return f"free of {rest[1]} bytes at offset {rest[0]}"
    if kind == "grow":
        return f"a further segment of {rest[1]} bytes of the heap"
    return f"{kind} (step {number})"
