"""Tasks of collectives: rows are read where they were made, or summed over ranks, and go on.

    move      rows of one buffer: what gathers, sends and copies do
    reduce    summands of all ranks for the same rows, in a fixed order, in fp32:
              the owner's + those of owner + 1, + 2, ...         as gemm_rs and gemm_ar add them
    reduce_add    the same, rounded, and rows that all ranks have

The own summand was never rounded, the others were when they left: so the result has the bits that
the overlapped lowering gives, whatever the number of workers.

Shapes  source, own: rows of n elements, from the task's `row` on; partials: [num_ranks * slab, n],
        the task's rows from `part_row` on in each slab
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.tiles import fragments


@triton.jit
def load_rows(source, first, at, n, stride, tile):
    """The task's rows of `source` from row `first` on, in fp32; zeros outside."""
    i = tl.arange(0, tile.m)
    j = at.i_n * tile.n + tl.arange(0, tile.n)
    pointers = source + (first + i).to(tl.int64)[:, None] * stride + j[None, :]
    mask = (i < at.rows)[:, None] & (j < n)[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def move(at, source, n, stride, tile, emit: tl.constexpr, emit_args, world):
    value = load_rows(source, at.row, at, n, stride, tile)
    emit(at, fragments.Cells(0, at.i_n * tile.n, 0, True), value, emit_args, world)


class Summands(NamedTuple):
    """The own summand, rows own_stride elements apart; and those of other ranks, of which each has
    `slab` rows, stride elements apart. Parts of a summand lie one behind the other."""

    own: Any
    own_stride: Any
    partials: Any
    stride: Any
    slab: Any


@triton.jit
def _summand(of, at, given, split_k: tl.constexpr, rank, n, tile):
    """That of rank `of`, in `split_k` parts. given: Summands"""
    rows = given.slab // split_k
    if of == rank:
        value = load_rows(given.own, at.row, at, n, given.own_stride, tile)
        for part in tl.static_range(1, split_k):
            value += load_rows(given.own, at.row + part * rows, at, n, given.own_stride, tile)
    else:
        first = of * given.slab + at.part_row
        value = load_rows(given.partials, first, at, n, given.stride, tile)
        for part in tl.static_range(1, split_k):
            value += load_rows(given.partials, first + part * rows, at, n, given.stride, tile)
    return value


@triton.jit
def _sum(at, given, split_k: tl.constexpr, rank, n, tile, world):
    value = _summand(at.owner, at, given, split_k, rank, n, tile)
    for hop in range(1, world.num_ranks):
        of = (at.owner + hop) % world.num_ranks
        value += _summand(of, at, given, split_k, rank, n, tile)
    return value


@triton.jit
def reduce(
    at, given, split_k: tl.constexpr, rank, n, tile, emit: tl.constexpr, emit_args, world
):  # fmt: skip
    value = _sum(at, given, split_k, rank, n, tile, world)
    emit(at, fragments.Cells(0, at.i_n * tile.n, 0, True), value, emit_args, world)


@triton.jit
def reduce_add(
    at, given, split_k: tl.constexpr, other, stride_other, rank, n, tile, emit: tl.constexpr,
    emit_args, world,
):  # fmt: skip
    """Rows of `other` lie as those of the result."""
    value = _sum(at, given, split_k, rank, n, tile, world).to(other.dtype.element_ty).to(tl.float32)
    value += load_rows(other, at.to_row, at, n, stride_other, tile)
    emit(at, fragments.Cells(0, at.i_n * tile.n, 0, True), value, emit_args, world)
