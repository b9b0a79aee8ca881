"""Where values lie: in the main memory of every rank at the same place, rows by rows, padded to
whole lines of the DMA engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.base.parts import part_of
from weft.compiler.passes.tile import number
from weft.ir.tensor import Type, pieces_of


@dataclass(frozen=True)
class Extent:
    """A size as ranks have it: all of it, or their part of each of its pieces."""

    size: int
    num_ranks: int = 1
    pieces: tuple[int, ...] = ()

    def on(self, rank: int) -> int:
        if not self.pieces:
            return self.size
        bounds = (part_of(size, rank, self.num_ranks) for size in self.pieces)
        return sum(end - first for first, end in bounds)

    @property
    def most(self) -> int:
        """The first rank has as many as any."""
        return self.on(0)

    @property
    def is_same(self) -> bool:
        return self.on(self.num_ranks - 1) == self.most

    @property
    def text(self) -> str:
        """As C, of the core's rank."""
        if self.is_same:
            return str(self.most)
        return " + ".join(f"mc_part({size}, core->rank, core->ranks)" for size in self.pieces)


def whole(size: int) -> Extent:
    return Extent(size)


def split(size: int, num_ranks: int) -> Extent:
    return Extent(size, num_ranks, (size,))


def extents_of(
    kind: Type, sizes: Mapping[str, int], num_ranks: int
) -> tuple[Extent, Extent]:  # fmt: skip
    """Rows and columns of a value."""
    found = [
        Extent(size, num_ranks, pieces_of(kind.placement, dim, size))
        for dim, size in enumerate(number(one, sizes) for one in kind.sizes)
    ]
    return found[0], found[1]


@dataclass(frozen=True)
class Value:
    """Units   offset, pitch, num_bytes: bytes; of one rank's memory"""

    name: str
    rows: Extent
    columns: Extent
    itemsize: int
    pitch: int = 0
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return self.rows.most * self.pitch


@dataclass(frozen=True)
class View:
    """All rows of some columns; `first_row`: of a slab, whose rows are those of `rows`."""

    value: Value
    columns: Extent
    first: int = 0
    first_row: int = 0
    rows: Extent | None = None

    @property
    def num_rows(self) -> Extent:
        return self.rows or self.value.rows

    @property
    def name(self) -> str:
        return self.value.name

    def first_byte(self, column: int = 0) -> int:
        return (self.first + column) * self.value.itemsize


def view_of(value: Value) -> View:
    return View(value, value.columns)
