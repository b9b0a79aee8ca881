"""Where the tile of a task goes: hooks `emit(at, cells, value, args)` that bodies are given. Those
of what moves have the world beside their arguments: Triton 3.6 loses constants of tuples in tuples,
and a size of 1 is one.

    here          a tile of what this rank has                    what computes
    placed        rows anywhere in a buffer of this rank          copies, sums that stay
    to_owner      the same on the rank that sums these rows       summands
    everywhere    on every rank, this one too                     gathers, sums that all want
    to_all        here, and where each other rank sums            products that all ranks sum

Data alone: the task's row says which counters are signalled. Tiles are tile.m x tile.n, powers of
two; what lies outside of the value is left out. Columns follow from the tile's number and not from
the table: a compiler that knows what they divide by stores 16 bytes at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import fragments


class Here(NamedTuple):
    """Arguments of `here`: this rank has m rows of n elements, `stride` apart."""

    target: Any
    m: Any
    n: Any
    stride: Any


class Placed(NamedTuple):
    """Arguments of the others: n columns go to `target`, whose rows are `stride` elements apart."""

    target: Any
    n: Any
    stride: Any
    rank: Any


class Summands(NamedTuple):
    """Arguments of `to_all`: those of `here`, and where other ranks have this one's summand: rows
    from rank * slab on of `partials`, partials_stride elements apart."""

    target: Any
    m: Any
    n: Any
    stride: Any
    partials: Any
    partials_stride: Any
    slab: Any
    rank: Any


@triton.jit
def here(at, cells, value, args):
    """args: Here"""
    fragments.store_block(args.target, cells.row, cells.column, value, args.m, args.n, args.stride)


@triton.jit
def _places(at, cells, value, args):
    """Pointers from the task's to_row on, which of them there are, and the value rounded."""
    i = fragments.index(value, 0)
    j = cells.column + fragments.index(value, 1)
    rows = (at.to_row + i).to(tl.int64) * args.stride
    mask = (i < at.rows)[:, None] & (j < args.n)[None, :]
    return args.target + rows[:, None] + j[None, :], mask, value.to(args.target.dtype.element_ty)


@triton.jit
def placed(at, cells, value, args, world):
    """args: Placed"""
    pointers, mask, rounded = _places(at, cells, value, args)
    tl.store(pointers, rounded, mask=mask)


@triton.jit
def to_owner(at, cells, value, args, world):
    """args: Placed"""
    pointers, mask, rounded = _places(at, cells, value, args)
    wl.put(world, pointers, rounded, to=at.owner, mask=mask)


@triton.jit
def everywhere(at, cells, value, args, world):
    """The rank behind first, this one last. args: Placed"""
    pointers, mask, rounded = _places(at, cells, value, args)
    for hop in range(1, world.num_ranks + 1):
        to = (args.rank + hop) % world.num_ranks
        # weft: equivalent-mutant peer+1 of at: all ranks are sent the tile, in another order
        wl.put(world, pointers, rounded, to=to, mask=mask)


@triton.jit
def to_all(at, cells, value, args, world):
    """The rank behind first. args: Summands"""
    fragments.store_block(args.target, cells.row, cells.column, value, args.m, args.n, args.stride)
    i = cells.row + fragments.index(value, 0)
    j = cells.column + fragments.index(value, 1)
    rows = (args.rank * args.slab + i).to(tl.int64) * args.partials_stride
    mask = (i < args.m)[:, None] & (j < args.n)[None, :]
    pointers = args.partials + rows[:, None] + j[None, :]
    rounded = value.to(args.partials.dtype.element_ty)
    for hop in range(1, world.num_ranks):
        to = (args.rank + hop) % world.num_ranks
        wl.put(world, pointers, rounded, to=to, mask=mask)
