"""Tasks element by element: a tile is read where it was made, worked on in fp32, and goes on.

    silu        x * sigmoid(x)
    silu_mul    columns in pairs, gate and value: x is [m, 2 n]
    silu_mul_halves    all columns of gate, then those of value
    mul, add    x with the same elements of y

Shapes  x, y: [m, n] but for silu_mul and silu_mul_halves, whose x is [m, 2 n]; rows stride_x and
        stride_y elements apart; at: a tile of the result
Source  weft.tiles.hooks.epilogue has the formulas, so that fused and unfused round alike
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.tiles import fragments
from weft.tiles.hooks import epilogue


@triton.jit
def load_tile(x, at, rows: tl.constexpr, columns: tl.constexpr, m, n, stride):
    """Tile (i_m, i_n) of x[m, n] in fp32; zeros outside."""
    i = at.i_m * rows + tl.arange(0, rows)
    j = at.i_n * columns + tl.arange(0, columns)
    mask = (i < m)[:, None] & (j < n)[None, :]
    pointers = x + i.to(tl.int64)[:, None] * stride + j[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def silu(at, x, m, n, stride_x, tile, emit: tl.constexpr, emit_args):
    value = load_tile(x, at, tile.m, tile.n, m, n, stride_x)
    emit(at, fragments.whole(at, tile), epilogue.silu(value, x.dtype.element_ty), emit_args)


@triton.jit
def silu_mul(at, x, m, n, stride_x, tile, emit: tl.constexpr, emit_args):
    value = load_tile(x, at, tile.m, 2 * tile.n, m, 2 * n, stride_x)
    emit(at, fragments.whole(at, tile), epilogue.silu_mul(value, x.dtype.element_ty), emit_args)


@triton.jit
def silu_mul_halves(at, x, m, n, stride_x, tile, emit: tl.constexpr, emit_args):
    gate = load_tile(x, at, tile.m, tile.n, m, n, stride_x)
    value = load_tile(x + n, at, tile.m, tile.n, m, n, stride_x)
    emit(at, fragments.whole(at, tile), gate * tl.sigmoid(gate) * value, emit_args)


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
