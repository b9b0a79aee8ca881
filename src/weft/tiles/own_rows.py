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
wider rows (`View`), as gate and value of one product are. What is done to heads is done to rows of
one head each: there are `heads` of them to a row of memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.tiles import angles, composition, fragments, rows


class View(NamedTuple):
    """Rows of neighbouring elements from `begin` on, `pitch` elements from one to the next, or
    where each is several heads of a Cut from one of these to the next."""

    begin: Any
    pitch: Any


class Cut(NamedTuple):
    """m rows of n columns, in `columns` tiles; `heads` of them lie side by side."""

    m: Any
    n: Any
    columns: Any
    heads: Any


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
def _load(view, cut, cells, n, tile_m: tl.constexpr, tile_n: tl.constexpr):
    """In fp32; 0 where there are no such rows or columns, which a norm adds up."""
    i, j = cells.row + tl.arange(0, tile_m), cells.column + tl.arange(0, tile_n)
    row = (i // cut.heads).to(tl.int64) * view.pitch + i % cut.heads * n
    mask = (i < cut.m)[:, None] & (j < n)[None, :]
    return tl.load(view.begin + row[:, None] + j[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load(view, cut, cells, tile):
    """A tile's elements. view: View"""
    return _load(view, cut, cells, cut.n, tile.m, tile.n)


@triton.jit
def load_pairs(view, cut, cells, tile):
    """Those of which a gate makes a tile's: pairs of columns, side by side."""
    wide = fragments.Cells(cells.row, 2 * cells.column, 0, True)
    return _load(view, cut, wide, 2 * cut.n, tile.m, 2 * tile.n)


@triton.jit
def add(view, cut, cells, value, tile):
    return rows.rounded(value, view.begin) + load(view, cut, cells, tile)


@triton.jit
def mul(view, cut, cells, value, tile):
    return rows.rounded(value, view.begin) * load(view, cut, cells, tile)


@triton.jit
def turn(like, lengths, log2_base, cut, cells, value, tile):
    """Heads of value, as `like` holds them, turned by the angles of positions lengths[row] - 1."""
    i = cells.row + tl.arange(0, tile.m)
    position = tl.load(lengths + i // cut.heads, mask=i < cut.m, other=1) - 1
    j = tl.arange(0, tile.n // 2).to(tl.float32)
    speed = tl.exp2(j * (-2.0 * log2_base / tile.n))
    cos, sin = angles.cos_sin(position.to(tl.float32)[:, None] * speed[None, :])
    return _turned(rows.rounded(value, like), cos, sin)


@triton.jit
def turn_by_table(like, positions, table, cut, cells, value, tile):
    """The same by rows of table[positions, head]: cosines, then sines."""
    i = cells.row + tl.arange(0, tile.m)
    mask = (i < cut.m)[:, None]
    position = tl.load(positions + i // cut.heads, mask=i < cut.m, other=0)
    there = table + position.to(tl.int64)[:, None] * tile.n + tl.arange(0, tile.n // 2)[None, :]
    cos = tl.load(there, mask=mask, other=0.0)
    sin = tl.load(there + tile.n // 2, mask=mask, other=0.0)
    return _turned(rows.rounded(value, like), cos, sin)


@triton.jit
def _turned(value, cos, sin):
    """The halves of each row, which is one head of all columns of a tile."""
    m: tl.constexpr = value.shape[0]
    n: tl.constexpr = value.shape[1]
    first, second = value.reshape(m, 2, n // 2).permute(0, 2, 1).split()
    turned = tl.join(first * cos - second * sin, second * cos + first * sin)
    return turned.permute(0, 2, 1).reshape(m, n)
