"""The GEMM template for rows that arrive from all ranks: C = all_gather(A over rows) @ B.

Communication CTAs of the launch push own rows first, where no copy engine brings them; then all
programs multiply: tiles of own rows first, read in place, then those of rank + 1, + 2, ... as they
arrive. `own` and `gathered_rows` are what tiles are read from: descriptors, or the pointers `a` and
`gathered` once more. `scaling` is a weft.tiles.hooks.scales.Scaling, or None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import weft.language as wl
from weft.language import slots
from weft.tiles import gemm, gemm_sm90, swizzle
from weft.tiles.hooks import feed, gather
from weft.tiles.hooks.scales import scaled_args


class Turns(NamedTuple):
    """In which order tiles are multiplied: `group_m` rows of tiles share columns; the first `head`
    rows of tiles are a group by themselves."""

    group_m: Any
    head: Any


@triton.jit
def ag_gemm_multiply(a, own, gathered, gathered_rows, b, c, scaling, rows_ready, fed, slot, shape,
                     split, turns, tile, world, pieces, feeders: tl.constexpr, block: tl.constexpr,
                     per_block: tl.constexpr):  # fmt: skip
    """On any target."""
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if feeders > 0:
        if program < feeders:
            slots.slot_wait_free(world, slot, e)
            feed.push_rows(world, a, gathered, rows_ready, fed, e, rank, split, shape.k, tile.m,
                           pieces, program, feeders, block)  # fmt: skip
    start = gather.first_row(rank, split, tile.m)
    words = split.chunks * gather.variable(world.num_ranks)
    if scaling is None:
        scales_args = None
    else:
        scales_args = scaled_args(scaling, shape)
    # The last programs have the fewest tiles: those are the feeders.
    gemm.gemm(
        b, shape, tile, tl.cdiv(shape.m, tile.m), num_programs - 1 - program, num_programs,
        swizzle.rotated, (turns.group_m, start, turns.head),
        gather.rows_or_own, gather.Arrival(own, gathered_rows, rows_ready, e, rank, split, world),
        gemm.emit_store, gemm.Stored(c, shape),
        done=gather.give_back if feeders > 0 else gather.await_words_and_give_back,
        done_args=gather.Done(rows_ready, e, words, program, num_programs, slot, world),
        scales=None if scaling is None else gemm.scales_of, scales_args=scales_args,
        per_block=per_block,
    )  # fmt: skip


@gluon.jit
def ag_gemm_multiply_sm90(a, own, gathered, gathered_rows, b, c, scaling, rows_ready, fed, partials,
                          summed, slot, shape, split, turns, world, feeders, pieces, first_wave,
                          by_engine: gl.constexpr, block: gl.constexpr, tile_m: gl.constexpr,
                          tile_n: gl.constexpr, tile_k: gl.constexpr, stages: gl.constexpr,
                          b_is_nk: gl.constexpr, per_block: gl.constexpr):  # fmt: skip
    """On Hopper, with the same hooks; operands are descriptors."""
    rank = wl.rank(world).to(gl.int32)
    e = slots.slot_epoch(slot)
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    if not by_engine:
        # The last programs have the fewest tiles, and those that are needed last.
        if num_programs - 1 - program < feeders:
            slots.slot_wait_free(world, slot, e)
            feed.push_rows(world, a, gathered, rows_ready, fed, e, rank, split, shape.k, tile_m,
                           pieces, num_programs - 1 - program, feeders, block)  # fmt: skip
    start = gather.first_row(rank, split, tile_m)
    order: gl.constexpr = swizzle.rotated
    ready: gl.constexpr = gather.rows_or_own
    scales: gl.constexpr = None if scaling is None else gemm.scales_of
    if scaling is None:
        scales_args = None
    else:
        scales_args = scaled_args(scaling, shape)
    emit: gl.constexpr = gemm.emit_store
    done: gl.constexpr = gather.await_words_and_give_back if by_engine else gather.give_back
    words = split.chunks * gather.variable(world.num_ranks)
    gemm_sm90.gemm(
        own, b, c, shape, gl.cdiv(shape.m, tile_m), program, num_programs,
        gemm_sm90.Shared(partials, summed, e, world),
        tile_m, tile_n, tile_k, stages, gemm_sm90.chunk_columns(tile_n), b_is_nk,
        order, (turns.group_m, start, turns.head),
        ready, gather.Arrival(own, gathered_rows, rows_ready, e, rank, split, world),
        emit, gemm.Stored(c, shape),
        done=done,
        done_args=gather.Done(rows_ready, e, words, program, num_programs, slot, world),
        scales=scales, scales_args=scales_args, per_block=per_block,
        early=turns.head * gl.cdiv(shape.n, tile_n), first_wave=first_wave,
    )  # fmt: skip
