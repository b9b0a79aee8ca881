"""Gradients of experts' weights: out[e, p, q] = sum over the slots s of e of x[s, p] y[s, q].

The end of ag_moe's and moe_rs's gradients. Rows lie by slot, sorted by expert, so an expert's are
one segment of the GEMM template, which sums over them; the device alone knows where it begins, and
the host waits for nothing. An expert without tokens has zeros.

Source  docs/decisions/009-hooks.md: segments
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.base.target import Target
from weft.plan.launches import Start
from weft.tiles import blocking, gemm, swizzle

GROUP_M = 8


class Experts(NamedTuple):
    """Arguments of the hooks: rows by slot, and int32[experts + 1] where each expert's begin."""

    x: Any
    y: Any
    first: Any


class Results(NamedTuple):
    """Arguments of `_emit`."""

    out: Any
    shape: Any


class At(NamedTuple):
    """A tile of an expert's gradient."""

    i_m: Any
    i_n: Any
    expert: Any


@triton.jit
def _order(i, num_m, num_n, args):
    """One expert after the other. args: (rows of tiles of each, group_m)"""
    expert = i // (args[0] * num_n)
    at = swizzle.grouped(i - expert * args[0] * num_n, args[0], num_n, (args[1],))
    return At(at.i_m, at.i_n, expert)


@triton.jit
def _segments(at, args):
    """args: ()"""
    return 1


@triton.jit
def _ready(at, segment, tile, args):
    """args: Experts"""
    first = tl.load(args.first + at.expert)
    rows = tl.load(args.first + at.expert + 1) - first
    return gemm.Contracted(args.x, args.y, first, first, rows)


@triton.jit
def _emit(at, cells, fragment, args):
    """args: Results"""
    out = args.out + at.expert.to(tl.int64) * args.shape.m * args.shape.n
    gemm.emit_store(at, cells, fragment, gemm.Stored(out, args.shape))


@triton.jit
def experts_wgrad_multiply(x, y, out, first, shape, experts, group_m, tile):
    num_m = tl.cdiv(shape.m, tile.m)
    gemm.gemm(
        None, shape, tile, num_m * experts, tl.program_id(0), tl.num_programs(0),
        _order, (num_m, group_m), _ready, Experts(x, y, first), _emit, Results(out, shape),
        segments=_segments, segments_args=(),
    )  # fmt: skip


def experts_wgrad(
    x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor, *, target: Target, is_nk: bool = False
) -> torch.Tensor:
    """x^T y of each expert's slots.

    Shapes  x: [slots, p], y: [slots, q], contiguous; counts: int32[num_ranks, experts] as
            moe_route's; out: [experts, p, q], with `is_nk` the transpose of a [experts, q, p]
    """
    if is_nk:
        return experts_wgrad(y, x, counts, target=target).transpose(1, 2)
    (slots, p), q, experts = x.shape, y.shape[1], counts.shape[1]
    out = torch.empty((experts, p, q), dtype=x.dtype, device=x.device)
    if not slots or not out.numel():
        return out.zero_()
    first = torch.zeros(experts + 1, dtype=torch.int32, device=x.device)
    first[1:] = counts.sum(0).cumsum(0).clamp(0, slots)  # whatever the counts say
    start(x, y, out, first, target).run()
    return out


def start(x: Any, y: Any, out: Any, first: Any, target: Target) -> Start:
    """The launch; `first` has where each expert's rows begin, and the end."""
    (slots, p), (experts, _, q) = x.shape, out.shape
    rows = slots if target.backend == "emu" else p
    cut = next(blocking.candidates(p, q, rows, str(x.dtype), target))
    # By pointers: an expert's rows end anywhere.
    tile = gemm.Tile(cut.tile_m, cut.tile_n, cut.tile_k, False, False, False)
    shape = gemm.Shape(p, q, slots, p, q, q)
    return Start(
        experts_wgrad_multiply, (min(experts * cut.num_tiles(p, q), target.num_sms), 1, 1),
        (x, y, out, first, shape, experts, GROUP_M, tile.as_constexpr()),
        {"num_warps": cut.num_warps, "num_stages": cut.num_stages},
    )  # fmt: skip
