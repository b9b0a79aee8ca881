"""The GEMM template for few rows: C[m, n] = A[m, k] @ B[k, n] where reading B takes all the time.

B is read once, by all programs alike: the work is tiles x steps of k, one unit after the other, of
which program p of P has units p * U / P .. (p + 1) * U / P - 1. Where rows are several tiles,
those of one column come one after the other, which finds B in L2.

    rows = ready(at)                       of all tiles, before the first unit, once
    for unit in this program's share:
        value += A[rows, step of k] @ B[step of k, tile]
        where the tile ends, or the share:
            emit(at, value) if the tile is this program's alone, else value -> `partials`
    for its first tile and its last, where they are shared:
        the last of the tile's programs to come here adds up what they have, and emits it

Sums are added in the order of k, whoever does it: they are the same each time, for one number of
programs. The loop over units is one loop, with the loads of later tiles under way where a tile
ends; one that contained another loop would not be pipelined.

Hooks are those of tiles/gemm.py, `ready` (asked for i_m = 0 alone) and `emit`. B lies as [k, n] or,
with `tile.b_is_nk`, as [n, k].

Limits  all of a launch's programs use one `partials`, which calls use in turns
Source  Stream-K (Osama et al. 2023) for the shares; CUTLASS's split over k with a semaphore
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import gemm
from weft.tiles.swizzle import At


class Partials(NamedTuple):
    """Where programs that share a tile meet.

    sums: fp32 [2 * programs, tile.m, tile.n]: what a program has of the first and of the last tile
    of its share. come: int32[tiles], how many of a tile's programs have been there: 0 before and
    after each call.
    """

    sums: Any
    come: Any


@triton.jit
def share_of(units, program, num_programs):
    """The units first .. end - 1 of a program, of which there are no more than units, or none.
    `.fn` is the same on Python integers."""
    end = units * (program + 1) // num_programs
    return units * program // num_programs, min(end, units)


@triton.jit
def holder_of(unit, units, num_programs):
    """The program that has this unit."""
    return ((unit + 1) * num_programs - 1) // units


@triton.jit
def tile_at(t, num_m):
    """Which tile is the t-th."""
    return At(t % num_m, t // num_m)


@triton.jit
def gemm_small(
    b,
    shape,
    tile,
    partials,
    program,
    num_programs,
    ready: tl.constexpr,
    ready_args,
    emit: tl.constexpr,
    emit_args,
):
    """Multiply this program's share; call it from a kernel. partials: Partials

    Sync    what the hooks do; programs that share a tile count themselves, and none waits
    """
    num_k, num_m = tl.cdiv(shape.k, tile.k), tl.cdiv(shape.m, tile.m)
    units = num_m * tl.cdiv(shape.n, tile.n) * num_k
    # Each of those that share a tile must have something of it.
    num_programs = min(num_programs, units)
    first, end = share_of(units, program, num_programs)
    rows = ready(At(0, tile_at(first // num_k, num_m).i_n), 0, tile, ready_args)
    value = tl.zeros((tile.m, tile.n), tl.float32)
    for unit in range(first, end):
        t = unit // num_k
        at = tile_at(t, num_m)
        at_k = (unit - t * num_k) * tile.k
        mine = gemm.Rows(rows.source, rows.first + at.i_m * tile.m, rows.end)
        left = gemm.load_a(mine, at_k, shape, tile)
        right = gemm.load_b(b, at.i_n * tile.n, at_k, shape, tile)
        value = tl.dot(left, right, value, input_precision="ieee")
        if (unit == end - 1) | (unit == (t + 1) * num_k - 1):
            begins = holder_of(t * num_k, units, num_programs)
            if begins == holder_of((t + 1) * num_k - 1, units, num_programs):
                emit(at, value, tile, emit_args)
            else:
                part = 2 * program + min(t - first // num_k, 1)
                tl.store(_places(partials.sums, part, tile), value)
            value = tl.zeros((tile.m, tile.n), tl.float32)
    if end > first:
        t_first, t_last = first // num_k, (end - 1) // num_k
        _add_up(t_first, num_m, num_k, units, tile, partials, num_programs, emit, emit_args)
        if t_last > t_first:
            _add_up(t_last, num_m, num_k, units, tile, partials, num_programs, emit, emit_args)


@triton.jit
def _add_up(t, num_m, num_k, units, tile, partials, num_programs, emit: tl.constexpr, emit_args):
    """This program's sums of tile t are stored, if others share it; the last one here emits it."""
    begins = holder_of(t * num_k, units, num_programs)
    ends = holder_of((t + 1) * num_k - 1, units, num_programs)
    if begins < ends:
        # weft: equivalent-mutant drop of complete_stores: sums are not stored asynchronously
        come = wl.atomic_add(partials.come + t, 1, order=wl.Order.ACQ_REL, scope=wl.Scope.DEVICE)
        if come == ends - begins:
            # Nobody counts any more in this call.
            tl.store(partials.come + t, 0)
            begun, _ = share_of(units, begins, num_programs)
            part = 2 * begins + min(t - begun // num_k, 1)
            total = tl.load(_places(partials.sums, part, tile))
            for other in range(begins + 1, ends + 1):
                # Of every later one this is the first tile.
                total += tl.load(_places(partials.sums, 2 * other, tile))
            emit(tile_at(t, num_m), total, tile, emit_args)


@triton.jit
def _places(sums, part, tile):
    """Pointers to a tile's sums."""
    rows, columns = tl.arange(0, tile.m), tl.arange(0, tile.n)
    return sums + (part * tile.m + rows[:, None]) * tile.n + columns[None, :]


def partial_elements(tile_m: int, tile_n: int, num_programs: int) -> int:
    """How many fp32 elements `Partials.sums` must hold."""
    return 2 * num_programs * tile_m * tile_n
