"""Tasks of norms: a tile of rows by their root mean square, times a weight for each column.

    rms_norm     out[i, j] = x[i, j] / sqrt(mean over j of x[i, j]^2 + eps) * weight[j]
    head_norm    the same of each head of `head` columns by itself

All of a row is read, tile.n columns at a time, wherever the tile stands in it; of heads those that
the tile meets.

Shapes  x: [m, n], of head_norm it may be parts.Parts; weight: [1, n], of heads [1, head]
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.megakernel.tasks import parts
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


@triton.jit
def head_norm(
    at, x, weight, m, n, stride, eps, head: tl.constexpr, tile, emit: tl.constexpr, emit_args
):  # fmt: skip
    width: tl.constexpr = triton.next_power_of_2(head)
    i = at.i_m * tile.m + tl.arange(0, tile.m)
    j = at.i_n * tile.n + tl.arange(0, tile.n)
    inner = tl.arange(0, width)
    mask = (i < m)[:, None] & (inner < head)[None, :]
    row = i.to(tl.int64)[:, None] * stride
    scale = tl.zeros((tile.m, tile.n), tl.float32)
    end = tl.minimum((at.i_n + 1) * tile.n, n)
    for one in range(at.i_n * tile.n // head, tl.cdiv(end, head)):
        there = row + one * head + inner[None, :]
        value = parts.load(x, there, mask, 0.0).to(tl.float32)
        of_head = tl.rsqrt(tl.sum(value * value, axis=1) / head + eps)
        scale = tl.where((j // head == one)[None, :], of_head[:, None], scale)
    gain = tl.load(weight + j % head, mask=j < n, other=0.0).to(tl.float32)
    inside = (i < m)[:, None] & (j < n)[None, :]
    value = parts.load(x, row + j[None, :], inside, 0.0).to(tl.float32)
    emit(at, fragments.whole(at, tile), value * scale * gain[None, :], emit_args)
