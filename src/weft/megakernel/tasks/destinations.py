"""Where the tile of a task goes: hooks `emit(at, value, tile, args)` that bodies are given. Those
of what moves have the world beside their arguments: Triton 3.6 loses constants of tuples in tuples,
and a size of 1 is one.

    here          a tile of what this rank has                    what computes
    placed        rows anywhere in a buffer of this rank          copies, sums that stay
    to_owner      the same on the rank that sums these rows       summands
    to_others     on all ranks but this one                       summands that every rank sums
    everywhere    on every rank, this one too                     gathers, sums that all want

Data alone: who is told of it stands in the task's row. Tiles are tile.m x tile.n, powers of two;
what lies outside of the value is left out. Columns follow from the tile's number and not from the
table: a compiler that knows what they divide by stores 16 bytes at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl


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


@triton.jit
def here(at, value, tile, args):
    """args: Here"""
    i = at.i_m * tile.m + tl.arange(0, tile.m)
    j = at.i_n * tile.n + tl.arange(0, tile.n)
    mask = (i < args.m)[:, None] & (j < args.n)[None, :]
    pointers = args.target + i.to(tl.int64)[:, None] * args.stride + j[None, :]
    tl.store(pointers, value.to(args.target.dtype.element_ty), mask=mask)


@triton.jit
def _cells(at, value, tile, args):
    """Pointers from the task's to_row on, which of them there are, and the value rounded."""
    i = tl.arange(0, tile.m)
    j = at.i_n * tile.n + tl.arange(0, tile.n)
    rows = (at.to_row + i).to(tl.int64) * args.stride
    mask = (i < at.rows)[:, None] & (j < args.n)[None, :]
    return args.target + rows[:, None] + j[None, :], mask, value.to(args.target.dtype.element_ty)


@triton.jit
def placed(at, value, tile, args, world):
    """args: Placed"""
    pointers, mask, rounded = _cells(at, value, tile, args)
    tl.store(pointers, rounded, mask=mask)


@triton.jit
def to_owner(at, value, tile, args, world):
    """args: Placed"""
    pointers, mask, rounded = _cells(at, value, tile, args)
    wl.put(world, pointers, rounded, to=at.owner, mask=mask)


@triton.jit
def to_others(at, value, tile, args, world):
    """The rank behind first. args: Placed"""
    pointers, mask, rounded = _cells(at, value, tile, args)
    for hop in range(1, world.num_ranks):
        to = (args.rank + hop) % world.num_ranks
        wl.put(world, pointers, rounded, to=to, mask=mask)


@triton.jit
def everywhere(at, value, tile, args, world):
    """The rank behind first, this one last. args: Placed"""
    pointers, mask, rounded = _cells(at, value, tile, args)
    for hop in range(1, world.num_ranks + 1):
        to = (args.rank + hop) % world.num_ranks
        # weft: equivalent-mutant peer+1 of at: all ranks are sent the tile, in another order
        wl.put(world, pointers, rounded, to=to, mask=mask)
