"""`combine`: the other ranks' shares of an own tile are added to its accumulator, in fp32.

    add_partials   shares that were pushed to `partials`
    add_staged    shares that copy engines have brought there, chunk by chunk of the columns

The order is always the same: this rank's share, then those of rank + 1, + 2, ...

Units  partials: [num_ranks, rows, n], by source, or [num_ranks, chunks, rows, n / chunks]
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.tiles import fragments
from weft.tiles.hooks.partition import first_row


@triton.jit
def add_partials(partials, parts, at, cells, value, rank, num_ranks: tl.constexpr):
    """value + what the other ranks have pushed for this own tile."""
    n = fragments.aligned(parts.n)
    first = partials + at.row.to(tl.int64) * n
    return _add_shares(at, cells, cells.column, value, first, n, parts, rank, num_ranks)


@triton.jit
def add_staged(partials, parts, at, cells, value, rank, num_ranks: tl.constexpr):
    """value + what engines have brought of the other ranks for this own tile."""
    of_columns = at.i_n // parts.chunk_n
    width = fragments.aligned(parts.n // parts.chunks)
    first = partials + (of_columns.to(tl.int64) * parts.rows + at.row) * width
    column = cells.column - of_columns * parts.chunk_n * parts.tile_n
    return _add_shares(at, cells, column, value, first, width, parts, rank, num_ranks)


@triton.jit
def _add_shares(at, cells, column, value, first, n, parts, rank, num_ranks: tl.constexpr):
    """value + the other ranks' shares; the tile's of rank 0 begins at `first`, in rows of n."""
    i, j, mask = cells_of(at, cells, column, value, n, parts)
    for hop in range(1, num_ranks):
        source = (rank + hop) % num_ranks
        value = add_share(value, first, source, i, j, mask, column, n, parts)
    return value


@triton.jit
def cells_of(at, cells, column, value, n, parts):
    """A fragment's rows within its tile, its columns from `column` on, and which of them there
    are."""
    i = first_row(at, cells, parts) + fragments.index(value, 0)
    # Columns are added last, in 64 bits: so they are constants of each load, and few of the loads'
    # addresses are kept over the hops, beside the accumulator. As offsets they did not fit in
    # registers.
    j = fragments.index(value, 1).to(tl.int64)
    return i, j, (i < at.end - at.row)[:, None] & (j < n - column)[None, :]


@triton.jit
def add_share(value, first, source, i, j, mask, column, n, parts):
    """value + the share of rank `source`, by `cells_of`."""
    of_source = tl.cast(fragments.aligned(parts.n), tl.int64) * parts.rows
    rows = first + source * of_source + column + i.to(tl.int64) * n
    return value + tl.load(rows[:, None] + j[None, :], mask=mask, other=0.0).to(tl.float32)
