"""How rows are split over ranks and cut into tiles, and which word of a signal belongs to a tile.

Tiles are cut within each rank's part of the rows: `tiles_m` rows of tiles to a part, the last of
them ragged or empty. So a tile has one owner. Where copy engines carry tiles, a part's columns are
cut in `chunks`, each of which lies in one piece: an engine moves it as one, and all rows share
columns meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import fragments, gemm


class Parts(NamedTuple):
    """How m rows of n elements are split and cut: `rows` to a rank, `tiles_m` rows of tiles to
    each part, num_n tiles in each, `words` signals to a tile. `lead` tiles come before the first
    own one, and the last `tail` are own ones, 1 at least: `order_of` gives both. For engines
    columns are in `chunks` of chunk_n tiles each; where there are several they are alike."""

    m: Any
    n: Any
    rows: Any
    tile_m: Any
    tile_n: Any
    tiles_m: Any
    num_n: Any
    words: Any
    lead: Any
    tail: Any
    group_m: Any
    chunks: Any
    chunk_n: Any


class Owned(NamedTuple):
    """A tile of rank `owner`: from row `row` of its part on, of which there are `end`."""

    i_m: Any
    i_n: Any
    owner: Any
    row: Any
    end: Any


@triton.jit
def read_owned(a, parts, at):
    """A tile's rows of A, there from the start."""
    first = at.owner * parts.rows
    return gemm.Rows(source=a, first=first + at.row, end=first + at.end)


@triton.jit
def read_for_owner(a, parts, at):
    """A tile's rows of A, which are this rank's own, times those columns of B that are its owner's:
    parts.n of them."""
    return gemm.Shifted(source=a, first=at.row, end=at.end, before=at.owner * parts.n)


@triton.jit
def rows_of(rank, parts):
    """How many rows a rank has."""
    return min(max(parts.m - rank * parts.rows, 0), parts.rows)


@triton.jit
def count(parts, num_ranks: tl.constexpr):
    """How many rows of tiles there are."""
    return num_ranks * parts.tiles_m


@triton.jit
def count_others(parts, num_ranks: tl.constexpr):
    """How many that are not this rank's."""
    return (num_ranks - 1) * parts.tiles_m


@triton.jit
def count_own(parts):
    return parts.tiles_m


@triton.jit
def signal_of(signals, at, part, source, num_ranks, parts):
    """The word that says: `source` has done its share of this tile, or of this part of it."""
    tile = (at.i_m % parts.tiles_m) * parts.num_n + at.i_n
    return signals + (tile * parts.words + part) * num_ranks + source


@triton.jit
def signals_of(part, parts):
    """The words first .. end - 1 that tell of a part of a tile. In Gluon each part has its own;
    elsewhere a tile is one part and has all, which ranks with the other template may wait for."""
    first, end = 0, parts.words
    if fragments.is_gluon():
        first, end = part, part + 1
    return first, end


@triton.jit
def signals_of_rows(cells, value, parts):
    """As `signals_of`, for the rows that `value` has of its tile."""
    return signals_of(cells.tile_row // value.shape[0], parts)


@triton.jit
def chunk_of(at, rank, parts):
    """Which of all ranks' chunks has this tile's columns, of those of `rank`."""
    return rank * parts.chunks + at.i_n // parts.chunk_n


@triton.jit
def is_last_of_chunk(counters, at, part, parts):
    """Count a part of a tile as stored; have all others of its chunk been here? All they did comes
    before what follows."""
    counter = counters + chunk_of(at, at.owner, parts)
    begin, end = signals_of(part, parts)
    stored = end - begin
    done = wl.atomic_add(counter, stored, order=wl.Order.ACQ_REL, scope=wl.Scope.DEVICE) + stored
    first = at.i_n // parts.chunk_n * parts.chunk_n
    columns = min(parts.num_n - first, parts.chunk_n)
    is_last = done == parts.tiles_m * columns * parts.words
    if is_last:
        # Nobody counts any more: the next call's programs come later in stream order.
        tl.store(counter, 0)
    return is_last


@triton.jit
def place_of(index, at, parts):
    """Where the tile's rows begin among `rows` elements of n for each `index`."""
    return (tl.cast(index, tl.int64) * parts.rows + at.row) * fragments.aligned(parts.n)


@triton.jit
def first_row(at, cells, parts):
    """A fragment's first row within its tile. Not by the constant `cells.tile_row`: offsets of rows
    would be the same in each tile, and were kept in registers during the products."""
    return cells.row - at.i_m * parts.tile_m


@triton.jit
def offsets(at, cells, value, parts):
    """Offsets of a fragment's elements from its tile's first row, and which of them there are."""
    n = fragments.aligned(parts.n)
    i = first_row(at, cells, parts) + fragments.index(value, 0)
    j = cells.column + fragments.index(value, 1)
    mask = (i < at.end - at.row)[:, None] & (j < n)[None, :]
    return i[:, None] * n + j[None, :], mask
