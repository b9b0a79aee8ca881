"""The kernels of the GEMM templates: any target's, and Hopper's. Hooks are their arguments.

Both take the same: up to four operands (descriptors, or pointers), which Triton's launcher must see
by themselves, all other arrays and signals in one tuple; then how this call is cut.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import weft.language as wl
from weft.language import slots
from weft.tiles import composition, gemm, gemm_sm90


@triton.jit
def product(
    hooks: tl.constexpr, operand_0, operand_1, operand_2, operand_3, arrays, slot, shape, mapping,
    turns, tile, world, block: tl.constexpr,
):  # fmt: skip
    """The GEMM template on any target."""
    _multiply(
        composition.Launch(
            wl.rank(world).to(tl.int32), slots.slot_epoch(slot), tl.program_id(0),
            tl.num_programs(0), turns, (operand_0, operand_1, operand_2, operand_3), arrays,
            None, shape, mapping, slot, world, block,
        ), tile, hooks,
    )  # fmt: skip


@triton.jit
def _multiply(given, tile, composed: tl.constexpr):
    hooks: tl.constexpr = composed.within(given)
    launch = composition.leaves(given)
    order: tl.constexpr = hooks.order
    ready: tl.constexpr = hooks.ready
    emit: tl.constexpr = hooks.emit
    combine: tl.constexpr = hooks.combine
    announce: tl.constexpr = hooks.announce
    done: tl.constexpr = hooks.done
    scales: tl.constexpr = hooks.scales
    segments: tl.constexpr = hooks.segments
    hooks.begin(launch)
    num_m = hooks.count(tile.m, launch)
    order_args = hooks.arrange(num_m, tile.m, launch)
    gemm.gemm(
        hooks.b(launch), given.shape, tile, num_m, hooks.first(launch), given.num_programs,
        order, order_args, ready, launch, emit, launch, combine=combine, combine_args=launch,
        announce=announce, announce_args=launch, done=done, done_args=launch, scales=scales,
        scales_args=launch, per_block=hooks.per_block, segments=segments, segments_args=launch,
        world=given.world,
    )  # fmt: skip
    collect(num_m, order_args, tile.m, tile.n, given, launch, hooks)
    hooks.end(launch)


@triton.jit
def collect(num_m, order_args, tile_m, tile_n, given, launch, hooks: tl.constexpr):
    """Other ranks' tiles, in the order in which they were multiplied here."""
    if hooks.collect is not None:
        num_n = given.mapping.num_n
        for i in range(given.program, num_m * num_n, given.num_programs):
            at = hooks.order(i, num_m, num_n, order_args)
            if at.owner != given.rank:
                hooks.collect(at, tile_m, tile_n, launch)


@gluon.jit
def product_sm90(
    hooks: gl.constexpr, operand_0, operand_1, operand_2, operand_3,
    peer_0, peer_1, peer_2, peer_3, peer_4, peer_5, peer_6,
    peer_7, peer_8, peer_9, peer_10, peer_11, peer_12, peer_13,
    arrays, sums, summed, slot, shape, mapping, turns, world,
    tile_m: gl.constexpr, tile_n: gl.constexpr, tile_k: gl.constexpr, stages: gl.constexpr,
    b_is_nk: gl.constexpr, block: gl.constexpr,
):  # fmt: skip
    """The same on Hopper; operands are descriptors, `sums` and `summed` its own. Peers' are of two
    arrays that tiles are sent to, by hop."""
    _multiply_sm90(
        composition.Launch(
            wl.rank(world).to(gl.int32), slots.slot_epoch(slot), gl.program_id(0),
            gl.num_programs(0), turns, (operand_0, operand_1, operand_2, operand_3), arrays,
            (
                (peer_0, peer_1, peer_2, peer_3, peer_4, peer_5, peer_6),
                (peer_7, peer_8, peer_9, peer_10, peer_11, peer_12, peer_13),
            ), shape, mapping, slot, world, block,
        ), sums, summed, tile_m, tile_n, tile_k, stages, b_is_nk, hooks,
    )  # fmt: skip


@gluon.jit
def _multiply_sm90(
    given, sums, summed, tile_m: gl.constexpr, tile_n: gl.constexpr, tile_k: gl.constexpr,
    stages: gl.constexpr, b_is_nk: gl.constexpr, composed: gl.constexpr,
):  # fmt: skip
    hooks: gl.constexpr = composed.within(given)
    launch = composition.leaves(given)
    order: gl.constexpr = hooks.order
    ready: gl.constexpr = hooks.ready
    emit: gl.constexpr = hooks.emit
    combine: gl.constexpr = hooks.combine
    announce: gl.constexpr = hooks.announce
    done: gl.constexpr = hooks.done
    scales: gl.constexpr = hooks.scales
    hooks.begin(launch)
    num_m = hooks.count(tile_m, launch)
    order_args = hooks.arrange(num_m, tile_m, launch)
    slices = None
    if hooks.segments is not None:
        slices = hooks.segments(0, launch)
    gemm_sm90.gemm(
        hooks.a(launch), hooks.b(launch), hooks.c(launch), given.shape, num_m,
        hooks.first(launch), given.num_programs,
        gemm_sm90.Shared(sums, summed, given.e, given.world),
        tile_m, tile_n, tile_k, stages, gemm_sm90.chunk_columns(tile_n), b_is_nk,
        order, order_args, ready, launch, emit, launch, combine=combine, combine_args=launch,
        announce=announce, announce_args=launch, done=done, done_args=launch, scales=scales,
        scales_args=launch, per_block=hooks.per_block, late=hooks.late,
        early=0 if given.turns is None else given.turns.head * gl.cdiv(given.shape.n, tile_n),
        first_wave=1 if given.turns is None else given.turns.first_wave, by_index=hooks.by_index,
        slices=slices,
    )  # fmt: skip
    collect(num_m, order_args, tile_m, tile_n, given, launch, hooks)
    hooks.end(launch)
