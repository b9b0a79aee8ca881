"""What Task IR says of a value: its dtype, its sizes, and how it lies on the ranks.

    x: bfloat16[m, 64] @ Shard(0)       each rank has a part of the rows
    routing: table[m, 2, 8] @ Replicate()    where 2 of 8 experts' rows of each of m tokens are

A size that is a name is known when the program is called. How many rows each expert has is known
on the device alone: a table says it, and what is sorted by it has room for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import text

# The dtype of tables that are made on the device: sizes are tokens, choices of each, experts.
TABLE = "table"


@dataclass(frozen=True)
class Times:
    """So many times a size that has a name: a row for each choice of a token."""

    size: str
    by: int


Size = int | str | Times


def times(size: Size, by: int) -> Size:
    """`by` times a size, as a number where it is one."""
    if isinstance(size, Times):
        return Times(size.size, size.by * by)
    return size * by if isinstance(size, int) else Times(size, by)


@dataclass(frozen=True)
class Shard:
    """Rank r has the r-th part along `dim`: ceil(size / ranks) each, the last may have fewer."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Every rank has all of it."""


@dataclass(frozen=True)
class Partial:
    """Every rank has a summand of it."""


@dataclass(frozen=True)
class ByExpert:
    """Every rank has the rows of its own experts, which lie as Shard(0): slots from its first one
    on, in room for all; how many they are the device knows."""


Placement = Shard | Replicate | Partial | ByExpert


@dataclass(frozen=True)
class Type:
    """A global tensor: its dtype by torch's name, its sizes, and how it lies on the mesh."""

    dtype: str
    sizes: tuple[Size, ...]
    placement: Placement | None = None

    def as_text(self) -> str:
        sizes = ", ".join(map(text.value, self.sizes))
        where = f" @ {text.value(self.placement)}" if self.placement is not None else ""
        return f"{self.dtype}[{sizes}]{where}"
