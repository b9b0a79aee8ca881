"""Tasks element by element: a tile is read where it was made, worked on in fp32, and goes on.

    activated    by an activation
    in_pairs     columns in pairs, gate and value: x is [m, 2 n]
    in_halves    all columns of gate, then those of value
    columns      those from `first` on
    mul, add     x with the same elements of y; where stride_y is 0, with those of its one row

Shapes  x, y: [m, n]; x of in_pairs and in_halves is [m, 2 n], of columns it has more; rows stride_x
        and stride_y elements apart; at: a tile of the result
Source  weft.tiles.hooks.epilogue has the formulas, so that fused and unfused round alike
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.tiles import fragments


@triton.jit
def load_tile(x, at, rows: tl.constexpr, columns: tl.constexpr, m, n, stride):
    """Tile (i_m, i_n) of x[m, n] in fp32; zeros outside."""
    i = at.i_m * rows + tl.arange(0, rows)
    j = at.i_n * columns + tl.arange(0, columns)
    mask = (i < m)[:, None] & (j < n)[None, :]
    pointers = x + i.to(tl.int64)[:, None] * stride + j[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def activated(
    at, x, m, n, stride_x, activation: tl.constexpr, tile, emit: tl.constexpr, emit_args
):  # fmt: skip
    value = load_tile(x, at, tile.m, tile.n, m, n, stride_x)
    emit(at, fragments.whole(at, tile), activation(value, x.dtype.element_ty), emit_args)


@triton.jit
def in_pairs(at, x, m, n, stride_x, gate: tl.constexpr, tile, emit: tl.constexpr, emit_args):
    value = load_tile(x, at, tile.m, 2 * tile.n, m, 2 * n, stride_x)
    emit(at, fragments.whole(at, tile), gate(value, x.dtype.element_ty), emit_args)


@triton.jit
def in_halves(
    at, x, m, n, stride_x, activation: tl.constexpr, tile, emit: tl.constexpr, emit_args
):  # fmt: skip
    gate = load_tile(x, at, tile.m, tile.n, m, n, stride_x)
    value = load_tile(x + n, at, tile.m, tile.n, m, n, stride_x)
    emit(at, fragments.whole(at, tile), activation(gate, x.dtype.element_ty) * value, emit_args)


@triton.jit
def columns(at, x, m, n, stride_x, first: tl.constexpr, tile, emit: tl.constexpr, emit_args):
    value = load_tile(x + first, at, tile.m, tile.n, m, n, stride_x)
    emit(at, fragments.whole(at, tile), value, emit_args)


@triton.jit
def mul(at, x, y, m, n, stride_x, stride_y, tile, emit: tl.constexpr, emit_args):
    value = load_tile(x, at, tile.m, tile.n, m, n, stride_x)
    value *= load_tile(y, at, tile.m, tile.n, m, n, stride_y)
    emit(at, fragments.whole(at, tile), value, emit_args)


@triton.jit
def add(at, x, y, m, n, stride_x, stride_y, tile, emit: tl.constexpr, emit_args):
    value = load_tile(x, at, tile.m, tile.n, m, n, stride_x)
    value += load_tile(y, at, tile.m, tile.n, m, n, stride_y)
    emit(at, fragments.whole(at, tile), value, emit_args)
