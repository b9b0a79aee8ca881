"""Tokens split zigzag over the ranks, so that causal attention is the same work on each.

    sequence   0 1 2 3 4 5 6 7          2n parts, here of 4 ranks
    rank 0     0             7
    rank 1       1         6
    rank 2         2     5
    rank 3           3 4

Of packed sequences each is cut so. What is split is attended by `ring_attention(.., zigzag=True)`
and `weft.ops.ag_attention(.., zigzag=True)`; all else in a model treats tokens one by one, but for
their positions: `zigzag_positions`.

Source  Zhu, ring-flash-attention (2024); context parallelism of Megatron-LM
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.base.errors import ShapeError
from weft.ops import all_gather
from weft.plan.sequence_shards import Shards, padded, rows_of, shards_in
from weft.runtime.world import World


def zigzag_split(x: Tensor, *, world: World, cu_seqlens: Tensor | None = None) -> Tensor:
    """This rank's tokens of x, which all ranks have alike. Differentiable; then the gradient,
    which is alike on all ranks again, is gathered.

    Shapes  x: [m, ..]; cu_seqlens: int32 [sequences + 1] as ag_attention takes them, by default
            one sequence of all tokens; the result: [(m + num_ranks - 1 - rank) // num_ranks, ..]
    Sync    stream-ordered on the current stream; the host reads no lengths; can be recorded
    """
    shards = shards_in(world, x.shape[0], True, cu_seqlens)
    return _Split.apply(x, world, shards)


def zigzag_join(
    x: Tensor, *, world: World, cu_seqlens: Tensor | None = None, m: int | None = None
) -> Tensor:
    """All ranks' tokens in their order, of own ones x: undoes `zigzag_split`. Collective;
    differentiable: of the gradient, which is alike on all ranks, each takes its tokens'.

    Shapes  m: tokens of all ranks, by default num_ranks * own ones: pass it where shards differ
    Sync    as `zigzag_split`
    Raises  ShapeError: x has another number of tokens than this rank's shard of m
    """
    m = x.shape[0] * world.num_ranks if m is None else m
    check_rows("zigzag_join", "x", x, m, world, zigzag=True)
    return _Join.apply(x, world, shards_in(world, m, True, cu_seqlens))


def zigzag_positions(m: int, *, world: World, cu_seqlens: Tensor | None = None) -> Tensor:
    """Of this rank's tokens the places within their sequences, as `rotary` takes them. int64"""
    return shards_in(world, m, True, cu_seqlens).positions(world.rank)[1]


def check_rows(op: str, name: str, x: Tensor, m: int, world: World, *, zigzag: bool) -> None:
    """Raises  ShapeError: this rank passes another number of tokens than its shard of m has"""
    rank, own = world.rank, rows_of(m, world.rank, world.num_ranks, zigzag)
    if x.shape[0] != own:
        raise ShapeError(
            f"{op}: rank {rank} passes {name} with {x.shape[0]} tokens, but of m={m} it has {own}"
            f"{' zigzag' if zigzag else ''}; pass m=, tokens of all ranks, where shards differ"
        )


def _own(x: Tensor, world: World, shards: Shards) -> Tensor:
    return x.index_select(0, shards.positions(world.rank)[0])


def _all(x: Tensor, world: World, shards: Shards) -> Tensor:
    if not shards.m:
        return x
    gathered = all_gather(padded(x, shards.m, world.num_ranks).contiguous(), world=world)
    return gathered.index_select(0, shards.places())


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World, shards: Shards) -> Tensor:
        ctx.world, ctx.shards = world, shards
        return _own(x, world, shards)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyright: ignore
        return _all(gradient, ctx.world, ctx.shards), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World, shards: Shards) -> Tensor:
        ctx.world, ctx.shards = world, shards
        return _all(x, world, shards)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyright: ignore
        return _own(gradient, ctx.world, ctx.shards), None, None
