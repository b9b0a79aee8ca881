"""The template for rows that this rank has, and works on alone: no other rank is asked.

    for i in this program's share of the tiles:
        cells = the tile's first row and column
        value = ready(cells, ...)         loaded, in fp32
        result(cells, value, ...)         worked on, and stored where it is wanted

A tile is tile.m rows of up to tile.n columns, a power of two. Where rows are worked on as a whole
(`rms_norm`) it has all columns; else so many that there are programs enough. It follows from the
width of rows: their number changes the grid and nothing else.

What is done element by element are the epilogues of products (hooks/epilogue.py), which round what
they are given as if it had been stored: what is fused is what is not. Operands may be columns of
wider rows (`View`), as gate and value of one product are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.tiles import composition, fragments


class View(NamedTuple):
    """Rows of neighbouring elements from `begin` on, `pitch` elements from one to the next."""

    begin: Any
    pitch: Any


class Cut(NamedTuple):
    """m rows of n columns, in `columns` tiles."""

    m: Any
    n: Any
    columns: Any


@triton.jit
def own_rows(hooks: tl.constexpr, arrays, slot, mapping, tile, world):
    """The kernel. mapping: Cut; tile: rows.Tile. Sync  none"""
    _own_rows(
        composition.Launch(
            0, 0, tl.program_id(0), tl.num_programs(0), None, None, arrays, None, mapping, mapping,
            slot, world, 0,
        ), tile, hooks,
    )  # fmt: skip


@triton.jit
def _own_rows(given, tile, composed: tl.constexpr):
    hooks: tl.constexpr = composed.within(given)
    launch = composition.leaves(given)
    cut = given.mapping
    num_tiles = tl.cdiv(cut.m, tile.m) * cut.columns
    for i in tl.range(given.program, num_tiles, given.num_programs, flatten=False):
        row, column = i // cut.columns * tile.m, i % cut.columns * tile.n
        value = hooks.ready(fragments.Cells(row, column, 0, True), tile, launch)
        hooks.result(fragments.Cells(row, column, 0, True), value, tile, launch)


@triton.jit
def _load(view, cells, m, n, tile_m: tl.constexpr, tile_n: tl.constexpr):
    """In fp32; 0 where there are no such rows or columns, which a norm adds up."""
    i, j = cells.row + tl.arange(0, tile_m), cells.column + tl.arange(0, tile_n)
    there = view.begin + i.to(tl.int64)[:, None] * view.pitch + j[None, :]
    return tl.load(there, mask=(i < m)[:, None] & (j < n)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load(view, cut, cells, tile):
    """A tile's elements. view: View"""
    return _load(view, cells, cut.m, cut.n, tile.m, tile.n)


@triton.jit
def load_pairs(view, cut, cells, tile):
    """Those of which a gate makes a tile's: pairs of columns, side by side."""
    wide = fragments.Cells(cells.row, 2 * cells.column, 0, True)
    return _load(view, wide, cut.m, 2 * cut.n, tile.m, 2 * tile.n)


@triton.jit
def add(view, cut, cells, value, tile):
    return value.to(view.begin.dtype.element_ty).to(tl.float32) + load(view, cut, cells, tile)


@triton.jit
def mul(view, cut, cells, value, tile):
    return value.to(view.begin.dtype.element_ty).to(tl.float32) * load(view, cut, cells, tile)
