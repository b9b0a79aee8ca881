"""The norm's task: a tile of rows by their root mean square, times a weight for each column.

    out[i, j] = x[i, j] / sqrt(mean over j of x[i, j]^2 + eps) * weight[j]

All of a row is read, tile.n columns at a time, wherever the tile stands in it.

Shapes  x: [m, n], weight: [1, n]
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.megakernel.tasks.elementwise import load_tile
from weft.tiles import fragments, swizzle


@triton.jit
def rms_norm(at, x, weight, m, n, stride, eps, tile, emit: tl.constexpr, emit_args):
    squares = tl.zeros((tile.m,), tl.float32)
    for block in range(0, tl.cdiv(n, tile.n)):
        value = load_tile(x, swizzle.At(at.i_m, block), tile.m, tile.n, m, n, stride)
        squares += tl.sum(value * value, axis=1)
    j = at.i_n * tile.n + tl.arange(0, tile.n)
    gain = tl.load(weight + j, mask=j < n, other=0.0).to(tl.float32)
    scale = tl.rsqrt(squares / n + eps)
    value = load_tile(x, at, tile.m, tile.n, m, n, stride)
    emit(at, fragments.whole(at, tile), value * scale[:, None] * gain[None, :], emit_args)
