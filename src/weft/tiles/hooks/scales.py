"""Scales of fp8 operands, of rows or of blocks of rows: where those of a tile lie.

Where A's rows are gathered their scales travel: every rank stores its own in all ranks' slots, own
ones too, before its rows travel, so whoever knows that rows have arrived knows it of their scales.
Scales of B, and of rows that each rank has, stay where they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import mapping, slots
from weft.tiles import gemm


class Apart(NamedTuple):
    """How far scales lie apart: A's by row and by block of k, B's by column, or `block_n` columns,
    and by block of k."""

    a_row: Any
    a_k: Any
    b_column: Any
    b_k: Any
    block_n: Any


@triton.jit
def push_scales(scale_a, gathered, a_row, a_k, blocks, slot, split, takes, world,
                block: tl.constexpr):  # fmt: skip
    """Store own scales of A in every slot, by as many programs each.

    Sync    what is launched behind it and releases, or lets an engine copy, tells of them too
    """
    rank = wl.rank(world).to(tl.int32)
    if takes:
        slots.slot_wait_free(world, slot, slots.slot_epoch(slot))
    pieces = tl.num_programs(0) // world.num_ranks
    # weft: equivalent-mutant peer+1 of at: all ranks are stored to, in another order
    to = (rank + 1 + tl.program_id(0) // pieces) % world.num_ranks
    piece = tl.program_id(0) % pieces
    first, own_end = mapping.rows_of_rank(rank, split)
    size = (own_end - first) * blocks
    length = tl.cdiv(size, pieces)
    end = min((piece + 1) * length, size)
    for start in range(piece * length, end, block):
        i = start + tl.arange(0, block)
        there = gathered + first * blocks + i
        row = (i // blocks).to(tl.int64)
        here = scale_a + row * a_row + (i % blocks).to(tl.int64) * a_k
        wl.put(world, there, here, to=to, mask=i < end)


@triton.jit
def scales(gathered, b, apart, at, tile, shape):
    """Those of a tile of C; A's as they lie in the slot. apart: Apart"""
    return gemm.scales_of(
        at, tile, gemm.Scaled(gathered, b, shape, apart.a_row, apart.a_k, apart.b_column,
                              apart.b_k, apart.block_n),
    )  # fmt: skip


@triton.jit
def scales_owned(a, b, apart, parts, at, tile, shape):
    """Those of a tile of its owner's part of the rows, all of which this rank has. apart: Apart"""
    row = tl.cast(at.owner, tl.int64) * parts.rows + at.row
    column = at.i_n * tile.n
    return gemm.Scales(
        a + row * apart.a_row, b + (column // apart.block_n).to(tl.int64) * apart.b_column,
        at.end - at.row, shape.n - column, apart.a_row, apart.a_k, apart.b_column, apart.b_k,
    )  # fmt: skip
