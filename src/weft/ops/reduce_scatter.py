"""Reduce-scatter: out = this rank's rows of (x of rank 0 + x of rank 1 + ...).

Every rank passes all m rows and gets the sums of its shard; rows are split as torch.chunk splits
them, shards may be empty. Sums are in fp32 and rounded once.

Plan, in channels (weft.tiles.move): channel l deals with piece l of every shard
    sm_push tile of each shard -> its box on that shard's rank, tile by tile (weft.tiles.exchange);
            then sum boxes in the order of ranks
    ll      the same, each 32 bits in a word with their flag: no signal and no fence, at twice the
            bytes
    sm_pull sum, in the order of ranks, what lies in the memory of all ranks: x itself where it is
            symmetric, else what its rank has staged (weft.tiles.fetch)
    relay   piece of shard d -> the slot of the partner of d on this node, which sums its node's
            parts and sends the sum, in fp32, to d; d sums the nodes, and its own node's ranks,
            in their order. So each sum crosses between two nodes once
    nccl    torch.distributed's own, in another order of sums; shards of one size only

Signals (SET to the call's epoch e; each is waited for in the call that sets it)
    parts_ready[(group * node + seat) * channels + l]   the part of the rank with this seat, of the
                                      shard that has this group, is in this slot (relay). By it
    partials_ready[node * channels + l]  the sum of that node is in this slot (relay). By the
                                      partner
    slot_free, epoch, ticket          the slot's; the last program moves them
Pieces without rows are signalled too. Those of sm_push, ll and sm_pull are the mailbox's
(weft.tiles.mailboxes). All ranks have read x when a call ends.

Limits  x is contiguous and has the same rows on every rank; ll and sm_pull need all ranks on one
        node
Source  the design's section 4
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weft.base.card import calling
from weft.ops import _baselines
from weft.plan import exchanges, operations
from weft.plan.call_cache import find_call
from weft.plan.exchanges import Config, Transport, candidates, fake
from weft.plan.problems import sum_over_ranks
from weft.runtime.world import World
from weft.tiles import exchange, fetch, packets, relay

__all__ = ["Config", "Problem", "candidates", "fake", "op", "reduce_scatter"]

SCATTER = {"to_all": False, "sums": True}


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once: sums in fp32 in the order of ranks, rounded once."""
    total = sum_over_ranks(inputs)
    shards = (slice(*problem.shard(rank)) for rank in range(problem.num_ranks))
    return [total[rows].to(problem.torch_dtype) for rows in shards]


@dataclass(frozen=True)
class Problem(exchanges.Problem):
    """m rows of n elements on every rank, of which each gets the sums of its shard."""

    op = "reduce_scatter"
    sums = True
    transports = {
        "sm_push": Transport((exchange.push,), True, SCATTER),
        "relay": Transport((relay.relay_sums,), True),
        "ll": Transport((packets.push_packets,), constants=SCATTER),
        "sm_pull": Transport((fetch.pull,), constants=SCATTER),
    }

    def out_rows(self, rank: int) -> int:
        first, end = self.shard(rank)
        return end - first

    @property
    def flops(self) -> int:
        """Of one rank."""
        return (self.num_ranks - 1) * self.rows * self.n

    @property
    def groups(self) -> relay.Groups:
        """How parts lie in a relay's slot."""
        return relay.groups_among(self.nodes)

    def extents(self, rank: int, word: int) -> dict[str, Any]:
        return {**super().extents(rank, word), "groups": self.groups}

    def workspace(self, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
        shard, groups = self.rows * self.n, self.groups
        parts = groups.num_nodes * groups.per_node * groups.largest
        counts = {"parts": parts, "partials": groups.num_nodes}
        dtypes = {"parts": self.torch_dtype, "partials": torch.float32}
        return (
            {name: ((count * shard,), dtypes[name]) for name, count in counts.items()},
            {f"{x}_ready": (count * config.channels, torch.int64) for x, count in counts.items()},
        )


_make_call = partial(exchanges.make_call, Problem)
problem_of = partial(exchanges.problem_of, Problem)


def reduce_scatter(
    x: torch.Tensor, *, world: World, config: Config | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' tensors. Collective.

        out = (x of rank 0 + x of rank 1 + ...)[rows of this rank]

    Shapes  x: [m, ...], contiguous, the same on all ranks; out: [rows of this rank, ...], rows
            split as torch.chunk splits m
    Dtypes  float16, bfloat16 or float32; sums in fp32, rounded once
    Sync    stream-ordered on the current stream; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if operations.is_asked(x):
        return operations.as_operation("reduce_scatter", world, (x,), config=config, out=out)
    call = find_call(world, "reduce_scatter", (x, out), (config,), _make_call)
    return call(x, out)


run = calling(reduce_scatter)


op = exchanges.card(
    Problem,
    reference,
    run,
    summary="out = rows of this rank of sum(x over ranks)",
    on_heap=("sm_pull",),
    baselines=_baselines.REDUCE_SCATTER,
    backward=("all_gather",),
)
