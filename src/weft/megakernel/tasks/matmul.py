"""The product's task: one tile of x @ w by the GEMM template's body.

    tile[i, j] = sum over k of x[i, k] * w[k, j]         fp32, in steps of tile.k from 0 on

The order of sums is tile.k's alone: a product of any other lowering with the same tile.k has the
same bits.

Shapes  x: [m, k], w: [k, n]; shape: gemm.Shape; tile: gemm.Tile
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.tiles import gemm


@triton.jit
def matmul(at, x, w, shape, tile, emit: tl.constexpr, emit_args):
    gemm.one_tile(
        at, w, shape, tile, gemm.ready_always, gemm.Always(x, shape.m), emit, emit_args
    )  # fmt: skip
