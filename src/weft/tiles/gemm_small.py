"""The GEMM template for few rows: C[m, n] = A[m, k] @ B[k, n] where reading B takes all the time.

All rows are one tile, and B is read once, by all programs alike: the work is column tiles x steps
of k, one unit after the other, of which program p of P has units p * U / P .. (p + 1) * U / P - 1.

    rows = ready(at)                       before the first unit, once
    for unit in this program's share:
        value += A[rows, step of k] @ B[step of k, tile]
        where the tile ends, or the share:
            emit(at, value) if the tile is this program's alone, else value -> `partials`
    for its first tile and its last, where they are shared:
        the last of the tile's programs to come here adds up what they have, and emits it

Sums are added in the order of k, whoever does it: they are the same each time, for one number of
programs. The loop over units is one loop, with the loads of later tiles under way where a tile
ends; one that contained another loop would not be pipelined.

`fetch_ahead` reads the first of a program's share of B before `ready` is asked: what it has then
comes from L2 when it is multiplied, and the memory works while rows are waited for.

Hooks are those of tiles/gemm.py, `ready` and `emit`; the tile's i_m is 0. B lies as [k, n] or, with
`tile.b_is_nk`, as [n, k].

Limits  m at most tile.m; all of a launch's programs use one `partials`, which calls use in turns
Source  Stream-K (Osama et al. 2023) for the shares; CUTLASS's split over k with a semaphore
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import gemm
from weft.tiles.swizzle import At


class Partials(NamedTuple):
    """Where programs that share a tile meet.

    sums: fp32 [2 * programs, tile.m, tile.n]: what a program has of the first and of the last tile
    of its share. come: int32[column tiles], how many of a tile's programs have been there: 0
    before and after each call.
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
def fetch_ahead(b, shape, tile, num_units, program, num_programs):
    """Have the first `num_units` of this program's units of B brought into L2; b: a pointer."""
    num_k = tl.cdiv(shape.k, tile.k)
    units = tl.cdiv(shape.n, tile.n) * num_k
    first, end = share_of(units, program, min(num_programs, units))
    for unit in range(first, min(first + num_units, end)):
        i = unit % num_k * tile.k + tl.arange(0, tile.k)
        j = unit // num_k * tile.n + tl.arange(0, tile.n)
        # Volatile: what nobody uses would not be loaded.
        if tile.b_is_nk:
            pointers = b + j.to(tl.int64)[:, None] * shape.stride_b + i[None, :]
            tl.load(pointers, mask=(j < shape.n)[:, None] & (i < shape.k)[None, :], volatile=True)
        else:
            pointers = b + i.to(tl.int64)[:, None] * shape.stride_b + j[None, :]
            tl.load(pointers, mask=(i < shape.k)[:, None] & (j < shape.n)[None, :], volatile=True)


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
    num_k = tl.cdiv(shape.k, tile.k)
    units = tl.cdiv(shape.n, tile.n) * num_k
    # Each of those that share a tile must have something of it.
    num_programs = min(num_programs, units)
    first, end = share_of(units, program, num_programs)
    rows = ready(At(0, first // num_k), 0, tile, ready_args)
    value = tl.zeros((tile.m, tile.n), tl.float32)
    for unit in range(first, end):
        i_n = unit // num_k
        at_k = (unit - i_n * num_k) * tile.k
        left = gemm.load_a(rows, at_k, shape, tile)
        right = gemm.load_b(b, i_n * tile.n, at_k, shape, tile)
        value = tl.dot(left, right, value, input_precision="ieee")
        if (unit == end - 1) | (unit == (i_n + 1) * num_k - 1):
            if _is_alone(i_n, num_k, units, num_programs):
                emit(At(0, i_n), value, tile, emit_args)
            else:
                part = 2 * program + min(i_n - first // num_k, 1)
                tl.store(_places(partials.sums, part, tile), value)
            value = tl.zeros((tile.m, tile.n), tl.float32)
    if end > first:
        i_first, i_last = first // num_k, (end - 1) // num_k
        _add_up(i_first, num_k, units, tile, partials, num_programs, emit, emit_args)
        if i_last > i_first:
            _add_up(i_last, num_k, units, tile, partials, num_programs, emit, emit_args)


@triton.jit
def _is_alone(i_n, num_k, units, num_programs):
    """Is all of tile i_n one program's?"""
    begins = holder_of(i_n * num_k, units, num_programs)
    return begins == holder_of((i_n + 1) * num_k - 1, units, num_programs)


@triton.jit
def _add_up(i_n, num_k, units, tile, partials, num_programs, emit: tl.constexpr, emit_args):
    """This program's sums of a shared tile are stored; the last one that comes here emits it."""
    begins = holder_of(i_n * num_k, units, num_programs)
    ends = holder_of((i_n + 1) * num_k - 1, units, num_programs)
    if begins < ends:
        come = wl.atomic_add(partials.come + i_n, 1, order=wl.Order.ACQ_REL, scope=wl.Scope.DEVICE)
        if come == ends - begins:
            # Nobody counts any more in this call.
            tl.store(partials.come + i_n, 0)
            begun, _ = share_of(units, begins, num_programs)
            part = 2 * begins + min(i_n - begun // num_k, 1)
            total = tl.load(_places(partials.sums, part, tile))
            for other in range(begins + 1, ends + 1):
                # Of every later one this is the first tile.
                total += tl.load(_places(partials.sums, 2 * other, tile))
            emit(At(0, i_n), total, tile, emit_args)


@triton.jit
def _places(sums, part, tile):
    """Pointers to a tile's sums."""
    rows, columns = tl.arange(0, tile.m), tl.arange(0, tile.n)
    return sums + (part * tile.m + rows[:, None]) * tile.n + columns[None, :]


def partial_elements(tile_m: int, tile_n: int, num_programs: int) -> int:
    """How many fp32 elements `Partials.sums` must hold."""
    return 2 * num_programs * tile_m * tile_n


def num_tiles(n: int, tile_n: int) -> int:
    """How many words `Partials.come` must hold."""
    return ceil(n / tile_n)
