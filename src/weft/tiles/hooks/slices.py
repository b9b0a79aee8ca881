"""Own rows whose columns other ranks have: a product sums over one rank's slice after the other.

Each rank has all rows of some columns of A, and sends each other rank the rows that this one
multiplies. A tile's segments are the slices of rank, rank + 1, + 2, ..: its own is read in place,
the others' when they have arrived. `split` is a weft.language.mapping.StaticMapping of all rows
over ranks, each rank's in chunks: what a rank has sent of a chunk has a word of its own.

Units  received: [rows of this rank, k of all slices], in_place: [all rows, k of one slice]
"""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import gemm


@triton.jit
def slices(num_ranks: tl.constexpr):
    """How many segments a tile has."""
    return num_ranks


@triton.jit
def slice_or_own(
    received, in_place, split, at, segment, tile, shape, rank, num_ranks: tl.constexpr
):
    """A tile's rows of the next slice, and where the rows of B begin that it is multiplied by."""
    source = (rank + segment) % num_ranks
    row = at.i_m * tile.m
    array = received
    first = row
    column = source * shape.k
    stride = shape.stride_a
    if segment == 0:
        array = in_place
        first = rank * split.rank_rows + row
        column = 0
        stride = shape.k
    return gemm.Slice(
        source=array, first=first, end=first + shape.m - row, column=column, stride=stride,
        above=source * shape.k,
    )  # fmt: skip


@triton.jit
def wait_slice(
    signals, split, at, segment, tile, e, shape, rank, world, num_ranks: tl.constexpr,
    unless_own: tl.constexpr, order: tl.constexpr, scope: tl.constexpr,
):  # fmt: skip
    """Before a tile's rows of a slice are read: for the chunks that they are in."""
    if not unless_own or segment > 0:
        source = (rank + segment) % num_ranks
        row = at.i_m * tile.m
        chunk = row // split.chunk_rows
        count = (min(row + tile.m, shape.m) - 1) // split.chunk_rows - chunk + 1
        word = signals + source * split.chunks + chunk
        wl.wait(word, e, count, order=order, scope=scope, world=world)
