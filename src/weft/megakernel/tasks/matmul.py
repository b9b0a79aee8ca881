"""The task of a product: one tile of x @ w by the GEMM template's body.

    tile[i, j] = sum over k of x[i, k] * w[k, j]         fp32, in steps of tile.k from 0 on

The order of sums is tile.k's alone: a product of any other lowering with the same tile.k has the
same bits. Where k is split, the task sums up its own part of it: as many steps of tile.k as all
others have, the last parts fewer, or none. What reads the product adds the parts up (parts.py).

`gated` has a gate behind it, in registers: of n columns in pairs it leaves n / 2. It rounds what
it is given first, so the bits are those of two tasks.

Shapes  x: [m, k], w: [k, n]; shape: gemm.Shape; split_k: parts of k; tile: gemm.Tile
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.tiles import fragments, gemm
from weft.tiles.hooks import epilogue


@triton.jit
def _part(at, x, w, shape, split_k: tl.constexpr, tile):
    """(x, w, shape) of the task's part of k."""
    if split_k > 1:
        most = tl.cdiv(tl.cdiv(shape.k, tile.k), split_k) * tile.k
        first = at.part * most
        k = tl.minimum(shape.k - first, most)
        x += first
        if tile.b_is_nk:
            w += first
        else:
            w += first.to(tl.int64) * shape.stride_b
        own = gemm.Shape(shape.m, shape.n, k, shape.stride_a, shape.stride_b, shape.stride_c)
    else:
        own = shape
    return x, w, own


@triton.jit
def matmul(at, x, w, shape, split_k: tl.constexpr, tile, emit: tl.constexpr, emit_args):
    x, w, shape = _part(at, x, w, shape, split_k, tile)
    gemm.one_tile(
        at, w, shape, tile, gemm.ready_always, gemm.Always(x, shape.m), emit, emit_args
    )  # fmt: skip


@triton.jit
def sent(at, x, w, shape, split_k: tl.constexpr, tile, emit: tl.constexpr, emit_args, world):
    """To a hook that needs the world: destinations.to_all"""
    x, w, shape = _part(at, x, w, shape, split_k, tile)
    rows = gemm.ready_always(at, 0, tile, gemm.Always(x, shape.m))
    value = gemm.multiply(rows, w, at.i_n, shape, tile)
    emit(at, fragments.whole(at, tile), value, emit_args, world)


@triton.jit
def gated(at, x, w, shape, gate: tl.constexpr, tile, emit: tl.constexpr, emit_args):
    rows = gemm.ready_always(at, 0, tile, gemm.Always(x, shape.m))
    value = gemm.multiply(rows, w, at.i_n, shape, tile)
    cells = epilogue.halved(fragments.whole(at, tile))
    emit(at, cells, gate(value, x.dtype.element_ty), emit_args)
