"""Scales of a product's fp8 operands: what kernels get of those that a caller passes."""

from __future__ import annotations

from math import ceil
from typing import Any

from weft.plan.launches import Start
from weft.tiles.gemm import BLOCK_K
from weft.tiles.hooks.scales import Apart, push_scales

# What one program stores in one slot; programs for a slot; scales that it moves at a time.
PIECE_BYTES, MOST_PIECES, BLOCK = 32 << 10, 16, 1024


def steps_of(scale: Any) -> tuple[int, int]:
    """How far scales lie apart; one for all is everywhere."""
    return (scale.stride(0), scale.stride(1)) if scale.numel() > 1 else (0, 0)


def apart_of(gathered: Any, scale_b: Any, scaling: str) -> Apart:
    """How those of a product lie; `gathered` are A's."""
    k, column = steps_of(scale_b)
    is_blocks = scaling == "blocks"
    block_n = BLOCK_K.value if is_blocks else 1
    return Apart(gathered.shape[1], column, k if is_blocks else 0, block_n)


def pushed(scale_a: Any, gathered: Any, split: Any, takes: bool, slot: Any, world: Any) -> Start:
    """The launch that stores own scales on every rank."""
    blocks = gathered.shape[1]
    pieces = max(1, min(MOST_PIECES, ceil(split.rank_rows * blocks * 4 / PIECE_BYTES)))
    given = (scale_a, gathered, *steps_of(scale_a), blocks, slot.arg, split, takes, world.arg)
    return Start(push_scales, (world.num_ranks * pieces, 1, 1), (*given, BLOCK), {"num_warps": 4})
