"""What grouped.py does, as the template for Hopper takes it: tiles in chunks, by four warps.

    feed           own tokens -> where they belong among all of rank `to`'s
    emit_slots     a chunk of a tile, in shared memory -> C, whose rows are slots
    store_value    the same of what something was done to, in registers

A tile's slots may end before it does, and those behind are another tile's: so results leave by
stores of threads, which have masks, and not by TMA.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import weft.language as wl
from weft.tiles.epilogues import VECTOR, layout_of_rows
from weft.tiles.gemm_sm90 import TILE_M

# Elements that a feeder's four warps have under way at once.
FED = gl.constexpr(16384)


@gluon.jit
def feed(x, gathered, to, lane, rank, k, experts, world):
    """As grouped.feed."""
    layout: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [4], [0])
    # Rows begin at multiples of VECTOR; said by arithmetic, since a hint would not survive.
    k = k // VECTOR * VECTOR
    own = min(max(experts.m - rank * experts.rows, 0), experts.rows)
    size = own.to(gl.int64) * k
    there = gathered + (rank * experts.rows).to(gl.int64) * k
    for start in range(lane * FED, size, experts.lanes * FED):
        i = start + gl.arange(0, FED, layout)
        wl.put(world, there + i, x + i, to=to, mask=i < size)


@gluon.jit
def emit_slots(at, row, column, chunk, args):
    """Store the chunk in C. args: gemm.Stored"""
    layout: gl.constexpr = layout_of_rows(chunk.shape[1], VECTOR)
    _store(args.c, at, row, column, chunk.load(layout), args.shape.n)


@gluon.jit
def store_value(c, at, row, column, value, num_columns):
    """Store a chunk's `value` in c[slots, num_columns], rounded to c's dtype."""
    _store(c, at, row, column, value.to(c.dtype.element_ty), num_columns)


@gluon.jit
def _store(c, at, row, column, value, num_columns):
    """`row` is counted as if each tile were whole."""
    layout: gl.constexpr = value.type.layout
    num_columns = num_columns // VECTOR * VECTOR
    inside = row % TILE_M + gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    i = at.first + inside
    j = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    mask = (i < at.end)[:, None] & (j < num_columns)[None, :]
    gl.store(c + i.to(gl.int64)[:, None] * num_columns + j[None, :], value, mask=mask)
