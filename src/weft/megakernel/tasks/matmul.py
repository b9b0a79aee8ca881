"""The task of a product: one tile of x @ w by the GEMM template's body.

    tile[i, j] = sum over k of x[i, k] * w[k, j]         fp32, in steps of tile.k from 0 on

The order of sums is tile.k's alone: a product of any other lowering with the same tile.k has the
same bits.

`gated` has a gate behind it, in registers: of n columns in pairs it leaves n / 2. It rounds what
it is given first, so the bits are those of two tasks.

`ahead` is called before the task waits for x: w is a weight, whose memory can be asked for.

Shapes  x: [m, k], w: [k, n]; shape: gemm.Shape; tile: gemm.Tile
"""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import fragments, gemm
from weft.tiles.hooks import epilogue

# Of a row of weights that lie as [n, k], asked for at once.
PIECE_BYTES = tl.constexpr(256)


@triton.jit
def ahead(at, w, shape, tile, num_bytes: tl.constexpr):
    """Ask L2 for the first `num_bytes` that the tile reads of w: all of its columns, from k = 0 on.

    Memory's bandwidth is idle while workers wait, and has to serve them all at once behind that.
    """
    item_bytes: tl.constexpr = w.dtype.element_ty.primitive_bitwidth // 8
    first = at.i_n * tile.n
    if tile.b_is_nk:
        width: tl.constexpr = PIECE_BYTES // item_bytes
        i = tl.arange(0, num_bytes // PIECE_BYTES)
        row = tl.minimum(first + i % tile.n, shape.n - 1)
        column = tl.minimum(i // tile.n * width, shape.k - width)
        has_room = shape.k >= width
    else:
        width: tl.constexpr = tile.n
        row = tl.minimum(tl.arange(0, num_bytes // (tile.n * item_bytes)), shape.k - 1)
        column = tl.minimum(first, shape.n - width)
        has_room = shape.n >= width
    if has_room:
        wl.prefetch(w + row.to(tl.int64) * shape.stride_b + column, width * item_bytes)


@triton.jit
def matmul(at, x, w, shape, tile, emit: tl.constexpr, emit_args):
    gemm.one_tile(
        at, w, shape, tile, gemm.ready_always, gemm.Always(x, shape.m), emit, emit_args
    )  # fmt: skip


@triton.jit
def sent(at, x, w, shape, tile, emit: tl.constexpr, emit_args, world):
    """To a hook that needs the world: destinations.to_all"""
    rows = gemm.ready_always(at, 0, tile, gemm.Always(x, shape.m))
    value = gemm.multiply(rows, w, at.i_n, shape, tile)
    emit(at, fragments.whole(at, tile), value, emit_args, world)


@triton.jit
def gated(at, x, w, shape, gate: tl.constexpr, tile, emit: tl.constexpr, emit_args):
    rows = gemm.ready_always(at, 0, tile, gemm.Always(x, shape.m))
    value = gemm.multiply(rows, w, at.i_n, shape, tile)
    cells = epilogue.halved(fragments.whole(at, tile))
    emit(at, cells, gate(value, x.dtype.element_ty), emit_args)
