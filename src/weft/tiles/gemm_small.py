"""The GEMM template for few rows: C[m, n] = A[m, k] @ B[k, n] where reading B takes all the time.

B is read once, by all programs alike: the work is tiles x steps of k, one unit after the other, of
which program p of P has units p * U / P .. (p + 1) * U / P - 1. Where rows are several tiles,
those of one column come one after the other, which finds B in L2.

    rows = ready(at)                       of all tiles, before the first unit, once
    for each tile of which this program's share has steps:
        value = sum over these of A[rows, step] @ B[step, tile]
        if it is not this program's alone: value -> `partials`, and the last of the tile's programs
            to come here adds up what they have
        emit(at, ..), by that one

Sums are added in the order of k, whoever does it: they are the same each time, for one number of
programs.

Weights are the left operand: a tile's sums are its transpose, [tile.n, tile.m], until they are
emitted. Tensor cores of Hopper take 64 columns of B as rows there and as few rows of A as there
are, straight from shared memory, where few rows as the left operand went through registers (a
tenth of the time, docs/performance/ag_gemm.md). How many programs there should be: `programs_for`.

Hooks are those of tiles/gemm.py, `ready` (asked for i_m = 0 alone) and `emit`. B lies as [k, n] or,
with `tile.b_is_nk`, as [n, k].

Limits  all of a launch's programs use one `partials`, which calls use in turns
Source  Stream-K (Osama et al. 2023) for the shares; CUTLASS's split over k with a semaphore
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.base.target import Target
from weft.tiles import fragments, gemm
from weft.tiles.blocking import Blocking
from weft.tiles.swizzle import At


class Partials(NamedTuple):
    """Where programs that share a tile meet.

    sums: fp32 [2 * programs, tile.n, tile.m]: what a program has of the first and of the last tile
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
    t_first = first // num_k
    rows = ready(At(0, tile_at(t_first, num_m).i_n), 0, tile, ready_args)
    for t in range(t_first, tl.cdiv(end, num_k)):
        at = tile_at(t, num_m)
        mine = gemm.Rows(rows.source, rows.first + at.i_m * tile.m, rows.end)
        begin = max(first, t * num_k) - t * num_k
        value = tl.zeros((tile.n, tile.m), tl.float32)
        for j in range(begin, min(end - t * num_k, num_k)):
            left = gemm.load_a(mine, j * tile.k, shape, tile)
            right = gemm.load_b(b, at.i_n * tile.n, j * tile.k, shape, tile)
            value = tl.dot(right.T, left.T, value, input_precision="ieee")
        begins = holder_of(t * num_k, units, num_programs)
        others = holder_of((t + 1) * num_k - 1, units, num_programs) - begins
        come = others
        if others > 0:
            part = 2 * program + min(t - t_first, 1)
            tl.store(_places(partials.sums, part, tile), value)
            # weft: equivalent-mutant drop of complete_stores: sums are not stored asynchronously
            come = wl.atomic_add(
                partials.come + t, 1, order=wl.Order.ACQ_REL, scope=wl.Scope.DEVICE
            )
            if come == others:
                # Nobody counts any more in this call.
                tl.store(partials.come + t, 0)
                begun, _ = share_of(units, begins, num_programs)
                part = 2 * begins + min(t - begun // num_k, 1)
                value = tl.load(_places(partials.sums, part, tile))
                for other in range(begins + 1, begins + others + 1):
                    # Of every later one this is the first tile.
                    value += tl.load(_places(partials.sums, 2 * other, tile))
        if come == others:
            emit(at, fragments.whole(at, tile), value.T, emit_args)


@triton.jit
def _places(sums, part, tile):
    """Pointers to a tile's sums."""
    columns, rows = tl.arange(0, tile.n), tl.arange(0, tile.m)
    return sums + (part * tile.n + columns[:, None]) * tile.m + rows[None, :]


def cuts(tile_m: int, n: int, target: Target) -> Iterator[Blocking]:
    """How to cut a product by TMA with an n of so many columns: as much of B under way as fits.

    One program on an SM, with many stages; where there are more tiles than SMs, two with fewer. 64
    rows are as many bytes as a tile's weights: there tiles of twice the columns instead, for which
    rows are read half as often (gemm_few_h200x1.json: n 26624, k 16384, m 16: 200 us and 204 with
    one program; m 64: 208 and 220 in narrow tiles).
    """
    one = Blocking(tile_m, 64, 128, 4, 8 if tile_m < 64 else 6)
    two, wide = replace(one, num_stages=4), Blocking(tile_m, 128, 64, 4, 6)
    if target.arch == 80:
        yield two
    elif n > one.tile_n * target.num_sms:
        yield from (wide if tile_m == 64 else two, one)
    else:
        yield one


def most_resident(cut: Blocking, dtype: str, out_dtype: str, tma: bool, target: Target) -> int:
    """How many programs fit at once, by their shared memory: two to an SM at most."""
    if target.backend == "emu":
        return target.num_sms
    needed = cut.shared_bytes(dtype, out_dtype, tma, target)
    # Sums on their way to memory, and what the launch itself takes.
    needed += cut.tile_m * cut.tile_n * 4 + 2048
    return target.num_sms * max(1, min(2, target.shared_bytes // needed))


def programs_for(tiles: int, num_k: int, most: int) -> int:
    """How many programs, at most `most`, should share so many tiles of `num_k` steps each.

    Several to a tile, or several tiles to one: where shares begin and end with tiles, or are equal
    parts of one, fewest programs meet. As few as half of them read memory at its full rate.
    """
    if tiles <= most:
        return tiles * max(1, min(most // tiles, num_k))
    return ceil(tiles / ceil(tiles / most))


def partial_elements(tile_m: int, tile_n: int, num_programs: int) -> int:
    """How many fp32 elements `Partials.sums` must hold."""
    return 2 * num_programs * tile_m * tile_n
