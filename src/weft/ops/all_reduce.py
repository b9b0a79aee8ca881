"""All-reduce: out = x of rank 0 + x of rank 1 + ..., on every rank, the same bits everywhere.

Sums are in fp32, in the order of ranks, and rounded once: all transports but relay between nodes,
and nccl, give the same bits.

Plan, in channels, tile by tile (weft.tiles.exchange)
    one_shot    tile of own x -> its box on every rank; every rank sums all tiles. One step a tile
    two_shot    x is cut into shares, one for each rank: tile of each share -> its box on that rank,
                which sums it and sends the sum to all; then boxes -> out
    sm_pull     x is cut into shares: every rank sums its share of what lies in the memory of all
                ranks, x itself where it is symmetric, else what its rank has staged, and puts the
                sum into every rank's out where that is symmetric, else beside it (weft.tiles.fetch)
    relay       reduce_scatter by relay, then all_gather by relay: of each shard of x, one sum of a
                node crosses to each other node, once
    nccl        torch.distributed's own, in another order of sums
    one_shot_ll, two_shot_ll    as those, each 32 bits in a word with their flag: no
                signal and no fence, at twice the bytes

Signals are the mailbox's (weft.tiles.mailboxes): arrived[l * num_ranks + src], the steps of channel
l of src that are here; or the flag in each packet. Tiles without elements are signalled too. A
relay's are those of its two operators.

Limits  x is contiguous and of one shape on all ranks; packets need all ranks on one node
Source  the design's section 4; the names are NCCL's and TensorRT-LLM's
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weft.base.card import calling
from weft.base.parts import full_part
from weft.ops import _baselines
from weft.ops.all_gather import Problem as Gather
from weft.ops.all_gather import all_gather
from weft.ops.reduce_scatter import Problem as Scatter
from weft.ops.reduce_scatter import reduce_scatter
from weft.plan import exchanges, operations
from weft.plan.call_cache import check_apart, find_call
from weft.plan.exchanges import Config, Transport, candidates, fake
from weft.plan.problems import sum_over_ranks
from weft.runtime.world import World
from weft.tiles import exchange, fetch, move, packets

__all__ = ["Config", "Problem", "all_reduce", "candidates", "fake", "op"]

ONE_SHOT = {"to_all": True, "sums": True}
# From here on sums are relayed between nodes; not measured, for want of a network.
RELAYED_BYTES = 1 << 16


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once: sums in fp32 in the order of ranks, rounded once."""
    total = sum_over_ranks(inputs)
    return [total.to(problem.torch_dtype) for _ in inputs]


def _relay(call: exchanges.Call) -> Callable[..., None]:
    """A reduce-scatter, then an all-gather."""
    world, (scatter, gather) = call.world, _relayed(call.problem, call.config)
    shape = (scatter[0].m, scatter[0].n)

    def start(x: torch.Tensor, out: torch.Tensor) -> None:
        shard = reduce_scatter(x.view(shape), world=world, config=scatter[1])
        all_gather(shard, world=world, m=shape[0], config=gather[1], out=out.view(shape))

    return start


@dataclass(frozen=True)
class Problem(exchanges.Problem):
    """m rows of n elements on every rank."""

    op = "all_reduce"
    sums = True
    transports = {
        "one_shot": Transport((exchange.push,), True, ONE_SHOT),
        "two_shot": Transport((exchange.push_twice,), True, boxes=2),
        "one_shot_ll": Transport((packets.push_packets,), constants=ONE_SHOT),
        "two_shot_ll": Transport((packets.push_packets_twice,)),
        "sm_pull": Transport((fetch.pull_twice,)),
        "relay": Transport(reaches_far=True, start=_relay),
    }

    @property
    def share(self) -> int:
        """Elements that one rank sums in two_shot; shares begin where pieces may."""
        line = move.LINE_BYTES.value // self.itemsize
        return math.ceil(full_part(self.m * self.n, self.num_ranks) / line) * line

    @property
    def shard_bytes(self) -> int:
        """What a channel takes its part of."""
        return self.share * self.itemsize

    @property
    def is_even(self) -> bool:
        return True

    @property
    def moved_bytes(self) -> int:
        """What one rank gets of others' parts and of their sums, in two_shot."""
        return 2 * (self.num_ranks - 1) * self.shard_bytes

    @property
    def flops(self) -> int:
        """Of one rank, in two_shot."""
        return (self.num_ranks - 1) * self.share

    @property
    def tuned_bytes(self) -> int:
        return self.total_bytes

    @property
    def align_bytes(self) -> int:
        return self.total_bytes

    def part_bytes(self, transport: str) -> int:
        return self.total_bytes if "one_shot" in transport else self.shard_bytes

    def staged_bytes(self, shares_out: bool) -> int:
        """Of what is staged, and of others' sums."""
        copies = (not self.in_place) + (not shares_out)
        return copies * self.num_ranks * self.shard_bytes

    def comes_last(self, transport: str) -> bool:
        """Four hops to save bytes where there are few."""
        return transport == "relay" and self.total_bytes < RELAYED_BYTES


_make_call = partial(exchanges.make_call, Problem)
problem_of = partial(exchanges.problem_of, Problem)


def all_reduce(
    x: torch.Tensor, *, world: World, config: Config | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of all ranks' tensors, the same bits on every rank. Collective.

        out = x of rank 0 + x of rank 1 + ...

    Shapes  x: any shape but a scalar, contiguous, the same on all ranks; out may be x
    Dtypes  float16, bfloat16 or float32; sums in fp32, rounded once
    Sync    stream-ordered on the current stream; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if operations.is_asked(x):
        return operations.as_operation("all_reduce", world, (x,), config=config, out=out)
    call = find_call(world, "all_reduce", (x, out), (config,), _make_call)
    if out is not None and 0 < abs(out.data_ptr() - x.data_ptr()) < x.nbytes:
        check_apart("all_reduce", out, {"x": x}, "pass x itself, or another out")
    return call(x, out)


def _relayed(problem: Problem, config: Config) -> list[tuple[exchanges.Problem, Config]]:
    """Elements as rows of up to a line, so that shards are cut as channels like it: the problems
    and configurations of a reduce-scatter and an all-gather."""
    n = math.gcd(problem.m * problem.n, move.LINE_BYTES.value // problem.itemsize)
    halves = []
    for kind in (Scatter, Gather):
        part = kind(problem.m * problem.n // n, n, problem.num_ranks, problem.dtype, problem.nodes)
        block = max(16, config.block * problem.itemsize // part.word_bytes)
        halves.append((part, Config("relay", config.channels, block, config.num_warps)))
    return halves


run = calling(all_reduce)


op = exchanges.card(
    Problem,
    reference,
    run,
    summary="out[m, n] = sum(x over ranks), on every rank",
    on_heap=("sm_pull",),
    baselines=_baselines.ALL_REDUCE,
    backward=(),
    composed=("relay",),
)
