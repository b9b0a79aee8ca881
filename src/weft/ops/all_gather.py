"""All-gather: out[m, n] = x of rank 0, x of rank 1, ... over each other, on every rank.

m is global and its rows are split as torch.chunk splits them; shards may be empty. Rows are moved
as integers, so any dtype is, bit by bit.

Plan, in channels (weft.tiles.move): channel l moves piece l of every shard
    sm_push      tile of own rows -> its box on every rank, tile by tile (weft.tiles.exchange);
                 then boxes -> out
    ll           the same, each 32 bits in a word with their flag: no signal and no fence, at
                 twice the bytes
    relay        own piece -> slots of near ranks, and of one partner on each other node, which
                 passes it on to its near ranks; then slot -> out
    sm_pull      memory of all ranks -> out: x itself where it is symmetric, else what its rank has
                 staged (weft.tiles.fetch)
    ce_pull      _stage: own piece -> own slot, unless x is symmetric; _announce; copy engines:
                 x or slots of the others -> out; _finish; beside them _keep: own piece -> out
    nccl         torch.distributed's own; shards of one size only
Own rows go from x to out in all of them.

Signals (SET to the call's epoch e; each is waited for in the call that sets it)
    rows_ready[src * channels + l]  piece l of src's shard is in this rank's slot (relay). By src,
                                 or its partner on this node
    rows_ready[src]              src's rows may be fetched (ce_pull). Set by src
    slot_free, epoch, ticket     the slot's; the last program moves them
Pieces without rows are signalled too: a waiter need not know the sizes. Those of sm_push, ll and
sm_pull are the mailbox's (weft.tiles.mailboxes). When a call ends all ranks have read a symmetric
x.

Limits  x is contiguous; ll, sm_pull and ce_pull need all ranks on one node
Source  the design's section 4; NCCL's LL protocol for packets
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.base.card import calling
from weft.base.dtypes import DTYPES
from weft.compiler import layouts
from weft.ops import _baselines
from weft.plan import exchanges, operations
from weft.plan.call_cache import check_shard, find_call, is_on_heap
from weft.plan.exchanges import Config, Transport, candidates, fake
from weft.plan.vectors import VECTOR_BYTES
from weft.runtime.world import World
from weft.tiles import copied, exchange, fetch, packets, relay

__all__ = ["Config", "Problem", "all_gather", "candidates", "fake", "op"]

GATHER = {"to_all": True, "sums": False}


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once."""
    gathered = torch.cat([one["x"] for one in inputs])
    return [gathered for _ in inputs]


class CopyEngine:
    """What a call by copy engines queues; recorded once it has come a few times."""

    def __init__(self, call: exchanges.Call) -> None:
        self.call, self.world, self.problem = call, call.world, call.problem
        self.replays = self.world.replays()

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        slot = self.call.acquire_slot()
        self.replays.run(
            (slot.number, x.data_ptr(), out.data_ptr()), lambda: self._queue(slot, x, out)
        )

    def _queue(self, slot: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        world, call, in_place = self.world, self.call, self.problem.in_place
        main, copier = world.current_stream(), world.stream("copy")
        one = Config("ce_pull", channels=1, num_warps=1)
        if not in_place:
            call.launch(copied.stage, call.config, slot, x, out)
        copier.wait(main)
        with copier:
            call.launch(copied.announce, one, slot, x, out)
        call.launch(copied.keep, call.config, slot, x, out)
        with copier:
            self._copy(x if in_place else slot.staged, out)
            call.launch(copied.finish, one, slot, x, out)
        main.wait(copier)

    def _copy(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The others' rows, one rank's after the other's: several at once are slower."""
        world, bytes_out = self.world, out.reshape(-1).view(torch.uint8)
        flat = rows.reshape(-1).view(torch.uint8)
        for hop in range(1, world.num_ranks):
            source = (world.rank + hop) % world.num_ranks
            first, end = (row * self.problem.row_bytes for row in self.problem.shard(source))
            if first < end:
                world.copy(bytes_out[first:end], world.peer(flat, source)[: end - first])


@dataclass(frozen=True)
class Problem(exchanges.Problem):
    """m rows of n elements over all ranks, each holding its shard."""

    op = "all_gather"
    dtypes = tuple(DTYPES)
    transports = {
        "sm_push": Transport((exchange.push,), True, GATHER),
        "relay": Transport((relay.relay_rows,), True),
        "ll": Transport((packets.push_packets,), constants=GATHER),
        "sm_pull": Transport((fetch.pull,), constants=GATHER),
        "ce_pull": Transport(
            (copied.stage, copied.announce, copied.keep, copied.finish), start=CopyEngine
        ),
    }

    def in_rows(self, rank: int) -> int:
        first, end = self.shard(rank)
        return end - first

    def staged_bytes(self, shares_out: bool) -> int:
        return 0 if self.in_place else self.shard_bytes

    def workspace(self, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
        if config.transport == "ce_pull":
            staged = max(self.staged_bytes(False), VECTOR_BYTES)
            return (
                {"staged": ((staged,), torch.uint8)},
                {"rows_ready": (self.num_ranks, torch.int64)},
            )
        return (
            {"gathered": ((self.total_bytes,), torch.uint8)},
            {"rows_ready": (self.num_ranks * config.channels, torch.int64)},
        )


def all_gather(
    x: torch.Tensor,
    *,
    world: World,
    m: int | None = None,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every rank's rows, in the order of ranks, on every rank. Collective.

        out[m, ...] = cat(x of rank 0, x of rank 1, ...)

    Shapes  x: [rows of this rank, ...], contiguous; m defaults to out's rows, else to num_ranks *
            x's rows: pass it where shards differ
    Dtypes  any; moved bit by bit
    Sync    stream-ordered on the current stream; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if operations.is_asked(x):
        rows = out.shape[0] if m is None and out is not None and out.dim() else m
        return operations.as_operation("all_gather", world, (x,), m=rows, config=config, out=out)
    call = find_call(world, "all_gather", (x, out), (m, config), _make_call)
    return call(x, out)


def _make_call(
    world: World, x: Any, out: Any, m: int | None, config: Config | None
) -> exchanges.Call:
    return exchanges.Call(world, problem_of(world, x, m, out), config, x, out)


def problem_of(world: World, x: Any, m: int | None = None, out: Any = None) -> Problem:
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    layouts.check_tensor("all_gather", "x", x, world)
    rows = x.shape[0]
    sized_by = out if m is None and out is not None and out.dim() else None
    if m is None:
        m = rows * world.num_ranks if sized_by is None else sized_by.shape[0]
    # An empty shard lies nowhere.
    in_place = m == rows * world.num_ranks and is_on_heap(world, x)
    problem = exchanges.problem_of(Problem, world, x, m=m, in_place=in_place)
    check_shard("all_gather", "x", rows, problem, world, sized_by)
    return problem


run = calling(all_gather, "m")


op = exchanges.card(
    Problem,
    reference,
    run,
    summary="out[m, n] = all_gather(x over rows)",
    smallest={"m": 2, "n": 64},
    on_heap=("sm_pull", "ce_pull"),
    baselines=_baselines.ALL_GATHER,
    backward=("reduce_scatter",),
)
