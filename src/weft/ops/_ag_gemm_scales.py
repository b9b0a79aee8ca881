"""Scales of ag_gemm's fp8 operands: what callers pass; how they travel is in tiles/hooks/scales.py.

Not an operator: a part of ag_gemm.py, which see.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch

from weft.base.errors import DtypeError, ShapeError
from weft.compiler import dtensors
from weft.ops._ag_gemm_problem import BLOCKS, FP8, ROWS, Problem
from weft.tiles import gemm
from weft.tiles.hooks.scales import Scaling

BLOCK_K = gemm.BLOCK_K.value
# What one program stores in one slot; programs for a slot.
PIECE_BYTES, MOST_PIECES = 32 << 10, 16
# Scales that a program moves at a time, and its warps.
BLOCK, NUM_WARPS = 1024, 4


# ---------------------------------------------------------------------------------------------
# The host


def blocks_of(problem: Problem) -> int:
    """Scales of one row of A."""
    return ceil(problem.k / BLOCK_K) if problem.scaling == BLOCKS else 1


def pieces_of(problem: Problem) -> int:
    """Programs that store one rank's scales in one slot."""
    return max(1, min(MOST_PIECES, ceil(problem.rows * blocks_of(problem) * 4 / PIECE_BYTES)))


def scaling_of(slot: Any, problem: Problem, scale_b: torch.Tensor) -> Scaling:
    """What kernels are told of a call on `slot`."""
    is_blocks = problem.scaling == BLOCKS
    k, column = steps_of(scale_b)
    return Scaling(
        slot.scales, scale_b, blocks_of(problem), column, k if is_blocks else 0,
        BLOCK_K if is_blocks else 1,
    )  # fmt: skip


def steps_of(scale: torch.Tensor) -> tuple[int, int]:
    """How far scales lie apart; one for all is everywhere."""
    return (scale.stride(0), scale.stride(1)) if scale.numel() > 1 else (0, 0)


def kind_of(a: torch.Tensor, b: torch.Tensor, scales: tuple[Any, Any]) -> str:
    """How operands are scaled: "", ROWS or BLOCKS; one scale for all is ROWS.

    Raises  ShapeError, DtypeError: scales that do not fit their operands, or are missing
    """
    is_fp8 = str(a.dtype).removeprefix("torch.") in FP8
    names = ("scale_a", "scale_b")
    missing = [name for name, scale in zip(names, scales, strict=True) if scale is None]
    for name, scale in zip(names, scales, strict=True):
        dtensors.refuse("ag_gemm", name, scale)
    if is_fp8 and missing:
        told = " and ".join(missing)
        raise DtypeError(f"ag_gemm: a is {a.dtype} and {told} is missing; pass both")
    if not is_fp8:
        if len(missing) < 2:
            raise DtypeError(f"ag_gemm: a is {a.dtype}, and scales are of fp8; leave them out")
        return ""
    (rows, k), n = a.shape, b.shape[1]
    blocks_k, blocks_n = ceil(k / BLOCK_K), ceil(n / BLOCK_K)
    wanted = {
        "scale_a": {ROWS: (rows, 1), BLOCKS: (rows, blocks_k)},
        "scale_b": {ROWS: (1, n), BLOCKS: (blocks_k, blocks_n)},
    }
    kinds = []
    for name, scale in zip(names, scales, strict=True):
        if scale.dtype != torch.float32 or scale.device != a.device:
            raise DtypeError(
                f"ag_gemm: {name} is {scale.dtype} on {scale.device}; it must be float32 on "
                f"{a.device}"
            )
        shape = tuple(scale.shape)
        found = {kind for kind, fits in wanted[name].items() if fits == shape}
        if scale.numel() == 1:
            found.add(ROWS)
        if not found:
            told = " or ".join(f"{fits} ({kind})" for kind, fits in wanted[name].items())
            raise ShapeError(f"ag_gemm: {name} has shape {shape}; it must be {told}, or one number")
        kinds.append(found)
    both = kinds[0] & kinds[1]
    if not both:
        raise ShapeError(
            f"ag_gemm: scale_a of shape {tuple(scales[0].shape)} is of {', '.join(kinds[0])}, "
            f"scale_b of shape {tuple(scales[1].shape)} of {', '.join(kinds[1])}; pass both of one "
            "kind"
        )
    return ROWS if ROWS in both else BLOCKS


def quantised(problem: Problem, rank: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One rank's random operands with random scales, as callers pass them."""
    first, end = problem.shard(rank)
    dtype = getattr(torch, problem.dtype)
    blocks_k, blocks_n = ceil(problem.k / BLOCK_K), ceil(problem.n / BLOCK_K)
    is_blocks = problem.scaling == BLOCKS
    shape_b = (blocks_k, blocks_n) if is_blocks else (1, problem.n)
    a = torch.randn(end - first, problem.k, generator=generator).to(dtype)
    b = torch.randn(problem.n, problem.k, generator=generator).to(dtype).t()
    return {
        "a": a,
        "b": b if problem.b_is_nk else b.contiguous(),
        "scale_a": torch.rand(end - first, blocks_of(problem), generator=generator) + 0.5,
        "scale_b": torch.rand(*shape_b, generator=generator) + 0.5,
    }


def spread(scale: torch.Tensor, shape: tuple[int, int], scaling: str) -> torch.Tensor:
    """A scale for each element of an operand of `shape`."""
    if scaling == BLOCKS:
        for axis, extent in enumerate(shape):
            if scale.shape[axis] != extent:
                scale = scale.repeat_interleave(BLOCK_K, axis).narrow(axis, 0, extent)
    return scale.expand(shape)
