"""Scales of fp8 operands: those of A travel to all ranks, of rows or of blocks of rows.

Every rank stores its own in all ranks' slots, own ones too, before its rows travel: whoever knows
that rows have arrived knows it of their scales. Scales of B stay where they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import mapping, slots
from weft.tiles import gemm


class Scaling(NamedTuple):
    """What kernels are told: A's scales in the slot, `blocks` to a row; B's, and how far they lie
    apart, one for each `block_n` columns."""

    gathered: Any
    b: Any
    blocks: Any
    b_column: Any
    b_k: Any
    block_n: Any


@triton.jit
def push_scales(scale_a, a_row, a_k, scaling, slot, split, world, block: tl.constexpr):
    """Store own scales of A in every slot, by as many programs each.

    Sync    what is launched behind it and releases, or lets an engine copy, tells of them too
    """
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    pieces = tl.num_programs(0) // world.num_ranks
    # weft: equivalent-mutant peer+1 of at: all ranks are stored to, in another order
    to = (rank + 1 + tl.program_id(0) // pieces) % world.num_ranks
    piece = tl.program_id(0) % pieces
    first, own_end = mapping.rows_of_rank(rank, split)
    size = (own_end - first) * scaling.blocks
    length = tl.cdiv(size, pieces)
    end = min((piece + 1) * length, size)
    for start in range(piece * length, end, block):
        i = start + tl.arange(0, block)
        there = scaling.gathered + first * scaling.blocks + i
        row = (i // scaling.blocks).to(tl.int64)
        here = scale_a + row * a_row + (i % scaling.blocks).to(tl.int64) * a_k
        wl.put(world, there, here, to=to, mask=i < end)


@triton.jit
def scaled_args(scaling, shape):
    """The Scaled of a tile of C: scales of A as they lie in the slot."""
    return gemm.Scaled(scaling.gathered, scaling.b, shape, scaling.blocks, 1, scaling.b_column,
                       scaling.b_k, scaling.block_n)  # fmt: skip
