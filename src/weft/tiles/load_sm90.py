"""What the producer of the template for Hopper (gemm_sm90.py) does for a tile: it loads the
operands of one step of k after the other into the stages that are empty.

TMA brings blocks of both operands; where rows of A lie by index (gemm.Indexed), threads copy them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

import weft.language as wl
from weft.tiles import fragments, tile_trace
from weft.tiles.gemm import Tile, is_indexed, is_shifted, is_slice, is_sliced
from weft.tiles.multiply_sm90 import wide_of

# Triton 3.9 has other names for them than 3.7.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# Where many matrices are read, steps of k from one wait for all other programs to the next.
PACE = gl.constexpr(32)


def block_columns(tile_n: int) -> int:
    """Columns of the blocks in which TMA moves B: whole ones make up each product's."""
    return tile_n & -tile_n


_block_columns = gluon.constexpr_function(block_columns)


@gluon.jit
def pace_words(shared, step):
    """Of two words behind those of sums this call's; and the other, of the call before."""
    words = shared.summed + 2 * step
    return words + shared.e % 2, words + (shared.e + 1) % 2


@gluon.jit
def paces_of(num_k):
    """How often programs wait for each other in a tile."""
    return (num_k + PACE - 1) // PACE


@gluon.jit
def _keep_pace(shared, i, step):
    """Wait until all programs have come as far as this one, which has waited i times before.

    Nothing but time depends on it: programs that read one matrix, each all of it, find it in L2 as
    long as they read it at once. Each is a little faster or slower than the others, tile by tile.
    """
    word, _ = pace_words(shared, step)
    # weft: equivalent-mutant value+1 of atomic: waits end early, and no data is behind them
    wl.atomic_add(word, 1, order=wl.Order.RELAXED, scope=wl.Scope.DEVICE)
    # weft: equivalent-mutant drop, value-1, count-1 of wait: no data is behind it
    # weft: allow spin-without-acquire: nothing but time depends on it
    wl.wait(word, (i + 1) * step, order=wl.Order.RELAXED, scope=wl.Scope.DEVICE,
            world=shared.world)  # fmt: skip


@gluon.jit
def load_one_tile(
    at, begin, end, filled, b, shape, operands_a, operands_b, empty, full,
    ready: gl.constexpr, ready_args, tile_m: gl.constexpr, tile_n: gl.constexpr,
    tile_k: gl.constexpr, stages: gl.constexpr, b_is_nk: gl.constexpr, unit=0, paced=False,
    shared=None, step=1, sliced: gl.constexpr = False, traced=None,
):  # fmt: skip
    """The producer's body: steps begin .. end - 1 of one tile's k. Returns stages filled so far.

    `sliced`: k comes in slices of shape.k, for each of which `ready` is asked.
    """
    tile = Tile(tile_m, tile_n, tile_k, b_is_nk, True, True)
    if traced is not None:
        start = wl.timestamp()
    if sliced:
        each = gl.cdiv(shape.k, tile_k)
        if traced is not None:
            waited = start - start
        for segment in range(begin // each, gl.cdiv(end, each)):
            if traced is not None:
                waited -= wl.timestamp()
            rows = ready(at, segment, tile, ready_args)
            if traced is not None:
                waited += wl.timestamp()
            skipped = segment * each
            filled = _load_steps(
                rows, at, gl.maximum(begin - skipped, 0), gl.minimum(end - skipped, each), filled,
                b, shape, operands_a, operands_b, empty, full, tile_m, tile_n, tile_k, stages,
                b_is_nk, unit, paced, shared, step,
            )  # fmt: skip
        if traced is not None:
            tile_trace.open_record(traced, unit, at, start, waited)
    else:
        rows = ready(at, 0, tile, ready_args)
        if traced is not None:
            tile_trace.open_record(traced, unit, at, start, wl.timestamp() - start)
        filled = _load_steps(
            rows, at, begin, end, filled, b, shape, operands_a, operands_b, empty, full, tile_m,
            tile_n, tile_k, stages, b_is_nk, unit, paced, shared, step,
        )  # fmt: skip
    return filled


@gluon.jit
def _load_steps(
    rows, at, begin, end, filled, b, shape, operands_a, operands_b, empty, full,
    tile_m: gl.constexpr, tile_n: gl.constexpr, tile_k: gl.constexpr, stages: gl.constexpr,
    b_is_nk: gl.constexpr, unit, paced, shared, step,
):  # fmt: skip
    """Steps of k of these rows of A and this tile's columns of B. Returns stages filled so far."""
    blocks: gl.constexpr = tile_n // _block_columns(tile_n)
    column = at.i_n * tile_n
    # Where B is one of several, in the direction in which they lie behind one another.
    above, before = 0, 0
    skipped = 0  # columns of A
    if is_sliced(rows):
        if b_is_nk:
            before = rows.slice * shape.n
        else:
            above = rows.slice * shape.k
    if is_shifted(rows):
        before = rows.before
    if is_slice(rows):
        above, skipped = rows.above, rows.column
    if is_indexed(rows):
        pointers = _places_of_rows(rows, shape, tile_m, tile_k)
    for j in range(begin, end):
        stage = filled % stages
        at_k = j * tile_k
        if shared is not None:
            if paced and j % PACE == 0:
                _keep_pace(shared, unit // step * paces_of(end) + j // PACE, step)
        mbarrier.wait(empty.index(stage), (filled // stages & 1) ^ 1)
        arrived = full.index(stage)
        if is_indexed(rows):
            mbarrier.expect(arrived, blocks * b.block_type.nbytes)
            copy_rows(operands_a.index(stage), pointers + at_k)
            async_copy.mbarrier_arrive(arrived, increment_count=False)
        else:
            a_bytes: gl.constexpr = rows.source.block_type.nbytes
            mbarrier.expect(arrived, a_bytes + blocks * b.block_type.nbytes)
            load_tile(rows.source, [rows.first, at_k + skipped], arrived, operands_a.index(stage))
        at_b = column + before
        _load_columns(b, at_b, at_k + above, arrived, operands_b.wide.index(stage), b_is_nk)
        if operands_b.rest is not None:
            at_b += wide_of(tile_n)
            _load_columns(b, at_b, at_k + above, arrived, operands_b.rest.index(stage), b_is_nk)
        filled += 1
    return filled


@gluon.jit
def _places_of_rows(rows, shape, tile_m: gl.constexpr, tile_k: gl.constexpr):
    """Pointers to a tile's first columns of A; behind its end those of its last row, which has
    arrived: no result of them is kept. rows: gemm.Indexed"""
    layout: gl.constexpr = fragments.layout_of_rows(tile_k, fragments.VECTOR)
    i = rows.first + gl.arange(0, tile_m, gl.SliceLayout(1, layout))
    index = gl.load(rows.index + gl.minimum(i, rows.end - 1)).to(gl.int64)
    stride = fragments.aligned(shape.stride_a).to(gl.int64)
    columns = gl.arange(0, tile_k, gl.SliceLayout(0, layout))
    return rows.source + (index * stride)[:, None] + columns[None, :]


@gluon.jit
def _load_columns(b, column, at_k, arrived, there, b_is_nk: gl.constexpr):
    """One product's columns of B in a stage, block by block."""
    along: gl.constexpr = 0 if b_is_nk else 1
    columns: gl.constexpr = there.shape[along]
    block: gl.constexpr = b.block_type.shape[along]
    for first in gl.static_range(0, columns, block):
        if b_is_nk:
            place = [column + first, at_k]
        else:
            place = [at_k, column + first]
        load_tile(b, place, arrived, there.slice(first, block, along))
