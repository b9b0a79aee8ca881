"""What Task IR says of a value: its dtype, its sizes, and how it lies on the ranks.

    x: bfloat16[m, 64] @ Shard(0)       each rank has a part of the rows
    routing: table[m, 2, 8] @ Replicate()    where 2 of 8 experts' rows of each of m tokens are

A size that is a name is known when the program is called. How many rows each expert has is known
on the device alone: a table says it, and what is sorted by it has room for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from weft.base.dtypes import parse_dtype
from weft.ir import text

if TYPE_CHECKING:
    import torch

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
class Halves:
    """Rank r has the r-th part of each half along `dim`, one behind the other: gate and up, which a
    checkpoint has side by side. As many elements as of Shard(dim)."""

    dim: int


@dataclass(frozen=True)
class Pieces:
    """Rank r has the r-th part of each piece along `dim`, one behind the other: queries, keys and
    values of one weight, which may differ in size. All ranks have parts of one size."""

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Where each piece begins and ends."""
        return tuple(pairwise((0, *accumulate(self.sizes))))


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


Placement = Shard | Halves | Pieces | Replicate | Partial | ByExpert


def is_split(placement: Placement | None, dim: int) -> bool:
    """Does a rank have but a part along `dim`? Of equal sizes, whichever elements they are."""
    return isinstance(placement, Shard | Halves | Pieces) and placement.dim == dim


def pieces_of(placement: Placement | None, dim: int, extent: int) -> tuple[int, ...]:
    """The sizes of those of which a rank has its part each, where `dim` is split; () if not."""
    if not is_split(placement, dim):
        return ()
    if isinstance(placement, Pieces):
        return placement.sizes
    halves = ((extent + 1) // 2, extent // 2)
    return halves if isinstance(placement, Halves) else (extent,)


@dataclass(frozen=True, init=False)
class Type:
    """A global tensor: its dtype by torch's name, its sizes, and how it lies on the mesh.

    The dtype may be given as torch has it (torch.bfloat16), or as the command line has it ("bf16").

    Raises  DtypeError: a dtype that weft does not know
    """

    dtype: str
    sizes: tuple[Size, ...]
    placement: Placement | None

    def __init__(
        self, dtype: str | torch.dtype, sizes: Sequence[Size], placement: Placement | None = None
    ) -> None:  # fmt: skip
        name = dtype if dtype == TABLE else parse_dtype(str(dtype)).name
        object.__setattr__(self, "dtype", name)
        object.__setattr__(self, "sizes", tuple(sizes))
        object.__setattr__(self, "placement", placement)

    def as_text(self) -> str:
        sizes = ", ".join(map(text.value, self.sizes))
        where = f" @ {text.value(self.placement)}" if self.placement is not None else ""
        return f"{self.dtype}[{sizes}]{where}"
