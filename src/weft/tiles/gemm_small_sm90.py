"""The GEMM template for few rows on Hopper, in Gluon: tiles/gemm_small.py, weights come first.

    producer, one warp     fills all stages with B first, then asks `ready`, then loads A beside it
    consumers, four warps  call `begin`; then multiply (wgmma) what the stages hold, unit by unit

So while rows are waited for as many bytes of weights arrive as shared memory holds: that is a third
to a half of what decode layers have. B is what wgmma takes from the left, 64 columns at a time, so
that few rows are no waste: sums are those of the transposed tile, [tile_n, tile_m].

Shares, their sums and their order are those of the plain twin. `ready` is the twin's; others:

    begin(args, options)   by the consumers, before all else: what rows wait for, perhaps; options
                           is a constant
    emit(at, value, args)  value: fp32 [tile_n, tile_m] in registers, see `emit_store`

Limits  tile_m 16, 32 or 64, tile_n 64 or 128; compute capability 9.0; extents as TMA takes them
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

import weft.language as wl
from weft.base.errors import ConfigError
from weft.base.target import Target
from weft.tiles.gemm import Tile
from weft.tiles.gemm_sm90 import load_tile
from weft.tiles.gemm_small import holder_of, share_of, tile_at
from weft.tiles.swizzle import At

# Warps of a launch: the consumers. The producer is added to them.
NUM_WARPS = 4
PRODUCER_REGISTERS = gl.constexpr(48)


@gluon.jit
def gemm_small(
    a_block,
    b,
    shape,
    partials,
    program,
    num_programs,
    tile_m: gl.constexpr,
    tile_n: gl.constexpr,
    tile_k: gl.constexpr,
    stages: gl.constexpr,
    b_is_nk: gl.constexpr,
    begin: gl.constexpr,
    begin_args,
    begin_options: gl.constexpr,
    ready: gl.constexpr,
    ready_args,
    emit: gl.constexpr,
    emit_args,
):
    """Multiply this program's share; a kernel of NUM_WARPS warps calls it. `a_block` is a
    descriptor whose blocks have the form in which `ready`'s source is read.

    Sync    what the hooks do; programs that share a tile count themselves, and none waits
    """
    operands_a = gl.allocate_shared_memory(a_block.dtype, [stages, tile_m, tile_k], a_block.layout)
    if b_is_nk:
        operands_b = gl.allocate_shared_memory(b.dtype, [stages, tile_n, tile_k], b.layout)
    else:
        operands_b = gl.allocate_shared_memory(b.dtype, [stages, tile_k, tile_n], b.layout)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
    num_k, num_m = gl.cdiv(shape.k, tile_k), gl.cdiv(shape.m, tile_m)
    units = num_m * gl.cdiv(shape.n, tile_n) * num_k
    # Each of those that share a tile must have something of it.
    num_programs = min(num_programs, units)
    gl.warp_specialize(
        [
            (
                _consume,
                (operands_a, operands_b, empty, full, num_k, num_m, units, partials, program,
                 num_programs, begin, begin_args, begin_options, emit, emit_args, tile_m, tile_n,
                 stages, b_is_nk),
            ),
            (
                _produce,
                (a_block, b, operands_a, operands_b, empty, full, num_k, num_m, units, program,
                 num_programs, ready, ready_args, tile_m, tile_n, tile_k, stages, b_is_nk),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load_b(b, unit, arrived, operand, num_k, num_m, tile_n: gl.constexpr, tile_k: gl.constexpr,
            b_is_nk: gl.constexpr):  # fmt: skip
    at_k, column = unit % num_k * tile_k, tile_at(unit // num_k, num_m).i_n * tile_n
    if b_is_nk:
        load_tile(b, [column, at_k], arrived, operand)
    else:
        load_tile(b, [at_k, column], arrived, operand)


@gluon.jit
def _load_a(rows, unit, arrived, operand, num_k, num_m, tile_m: gl.constexpr, tile_k: gl.constexpr):
    row = rows.first + tile_at(unit // num_k, num_m).i_m * tile_m
    load_tile(rows.source, [row, unit % num_k * tile_k], arrived, operand)


@gluon.jit
def _produce(
    a_block, b, operands_a, operands_b, empty, full, num_k, num_m, units, program, num_programs,
    ready: gl.constexpr, ready_args, tile_m: gl.constexpr, tile_n: gl.constexpr,
    tile_k: gl.constexpr, stages: gl.constexpr, b_is_nk: gl.constexpr,
):  # fmt: skip
    """Fill stage after stage with what the consumers multiply next."""
    first, end = share_of(units, program, num_programs)
    stage_bytes: gl.constexpr = a_block.block_type.nbytes + b.block_type.nbytes
    head = min(first + stages, end)
    for unit in range(first, head):
        arrived = full.index(unit - first)
        mbarrier.expect(arrived, stage_bytes)
        _load_b(b, unit, arrived, operands_b.index(unit - first), num_k, num_m, tile_n, tile_k,
                b_is_nk)  # fmt: skip
    at = At(0, tile_at(first // num_k, num_m).i_n)
    rows = ready(at, 0, Tile(tile_m, tile_n, tile_k, b_is_nk, True, True), ready_args)
    for unit in range(first, head):
        _load_a(rows, unit, full.index(unit - first), operands_a.index(unit - first), num_k, num_m,
                tile_m, tile_k)  # fmt: skip
    for unit in range(head, end):
        filled = unit - first
        stage = filled % stages
        mbarrier.wait(empty.index(stage), (filled // stages & 1) ^ 1)
        arrived = full.index(stage)
        mbarrier.expect(arrived, stage_bytes)
        _load_b(b, unit, arrived, operands_b.index(stage), num_k, num_m, tile_n, tile_k, b_is_nk)
        _load_a(rows, unit, arrived, operands_a.index(stage), num_k, num_m, tile_m, tile_k)


@gluon.constexpr_function
def _layout(tile_m):
    """Where wgmma leaves the sums of a transposed tile."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tile_m, 16]
    )


@gluon.jit
def _consume(
    operands_a, operands_b, empty, full, num_k, num_m, units, partials, program, num_programs,
    begin: gl.constexpr, begin_args, begin_options: gl.constexpr, emit: gl.constexpr, emit_args,
    tile_m: gl.constexpr, tile_n: gl.constexpr, stages: gl.constexpr, b_is_nk: gl.constexpr,
):  # fmt: skip
    """Sums over this program's share; the twin's text, but for where operands come from."""
    begin(begin_args, begin_options)
    layout: gl.constexpr = _layout(tile_m)
    first, end = share_of(units, program, num_programs)
    value = gl.zeros((tile_n, tile_m), gl.float32, layout)
    for unit in range(first, end):
        used = unit - first
        stage = used % stages
        mbarrier.wait(full.index(stage), used // stages & 1)
        left = operands_b.index(stage)
        if not b_is_nk:
            left = left.permute((1, 0))
        value = warpgroup_mma(left, operands_a.index(stage).permute((1, 0)), value)
        mbarrier.arrive(empty.index(stage), count=1)
        t = unit // num_k
        if (unit == end - 1) | (unit == (t + 1) * num_k - 1):
            begins = holder_of(t * num_k, units, num_programs)
            if begins == holder_of((t + 1) * num_k - 1, units, num_programs):
                emit(tile_at(t, num_m), value, emit_args)
            else:
                part = 2 * program + min(t - first // num_k, 1)
                gl.store(_places(partials.sums, part, value), value)
            value = gl.zeros((tile_n, tile_m), gl.float32, layout)
    if end > first:
        t_first, t_last = first // num_k, (end - 1) // num_k
        _add_up(t_first, num_m, num_k, units, value, partials, num_programs, emit, emit_args)
        if t_last > t_first:
            _add_up(t_last, num_m, num_k, units, value, partials, num_programs, emit, emit_args)


@gluon.jit
def _add_up(t, num_m, num_k, units, like, partials, num_programs, emit: gl.constexpr, emit_args):
    """As the twin's; `like` has the form of a tile's sums."""
    begins = holder_of(t * num_k, units, num_programs)
    ends = holder_of((t + 1) * num_k - 1, units, num_programs)
    if begins < ends:
        come = wl.atomic_add(partials.come + t, 1, order=wl.Order.ACQ_REL, scope=wl.Scope.DEVICE)
        if come == ends - begins:
            # Nobody counts any more in this call.
            gl.store(partials.come + t, 0)
            begun, _ = share_of(units, begins, num_programs)
            part = 2 * begins + min(t - begun // num_k, 1)
            total = gl.load(_places(partials.sums, part, like))
            for other in range(begins + 1, ends + 1):
                # Of every later one this is the first tile.
                total += gl.load(_places(partials.sums, 2 * other, like))
            emit(tile_at(t, num_m), total, emit_args)


@gluon.jit
def _places(sums, part, value):
    """Pointers to a tile's sums, transposed."""
    tile_n: gl.constexpr = value.shape[0]
    tile_m: gl.constexpr = value.shape[1]
    rows = gl.arange(0, tile_n, gl.SliceLayout(1, value.type.layout))
    columns = gl.arange(0, tile_m, gl.SliceLayout(0, value.type.layout))
    return sums + (part * tile_n + rows[:, None]) * tile_m + columns[None, :]


@gluon.jit
def emit_store(at, value, args):
    """Store the tile in C, rounded to C's dtype. args: gemm.Stored"""
    tile_n: gl.constexpr = value.shape[0]
    tile_m: gl.constexpr = value.shape[1]
    j = at.i_n * tile_n + gl.arange(0, tile_n, gl.SliceLayout(1, value.type.layout))
    i = at.i_m * tile_m + gl.arange(0, tile_m, gl.SliceLayout(0, value.type.layout))
    pointers = args.c + i.to(gl.int64)[None, :] * args.shape.stride_c + j[:, None]
    mask = (j < args.shape.n)[:, None] & (i < args.shape.m)[None, :]
    gl.store(pointers, value.to(args.c.dtype.element_ty), mask=mask)


def check(op: str, tile_m: int, tile_n: int, tile_k: int, stages: int, target: Target) -> None:
    """Raises  ConfigError: a tile or stages that this template, or `target`, cannot run"""
    if tile_m not in (16, 32, 64) or tile_n not in (64, 128) or tile_k not in (32, 64):
        raise ConfigError(
            f"{op}: tile {tile_m} x {tile_n} x {tile_k}; the template for few rows takes "
            "tile_m=16, 32 or 64, tile_n=64 or 128, tile_k=32 or 64"
        )
    most = most_stages(tile_m, tile_n, tile_k, target)
    if not 2 <= stages <= most:
        raise ConfigError(
            f"{op}: num_stages={stages} of {(tile_m + tile_n) * tile_k * 2} bytes; {target} has "
            f"{target.shared_bytes} bytes of shared memory: take 2 to {most}"
        )


def most_stages(tile_m: int, tile_n: int, tile_k: int, target: Target) -> int:
    """How many stages fit, beside barriers and what moves between warps."""
    return (target.shared_bytes - 3072) // ((tile_m + tile_n) * tile_k * 2)
