"""Reduce-scatter: out = this rank's rows of (x of rank 0 + x of rank 1 + ...).

Every rank passes all m rows and gets the sums of its shard; rows are split as torch.chunk splits
them, shards may be empty. Sums are in fp32 and rounded once.

Plan, in lanes (weft.tiles.move): lane l deals with piece l of every shard
    push    tile of each shard -> its box on that shard's rank, tile by tile (weft.tiles.exchange);
            then sum boxes in the order of ranks
    packets the same, each 32 bits in a word with their flag: no signal and no fence, at twice the
            bytes
    pull    sum, in the order of ranks, what lies in the memory of all ranks: x itself where it is
            symmetric, else what its rank has staged (weft.tiles.fetch)
    ring    the sum of shard d starts on rank d + 1 and goes from rank to rank, in fp32, each
            adding its part, until d adds the last: the order of sums is d + 1, d + 2, ..., d
    relay   piece of shard d -> the slot of the partner of d on this node, which sums its node's
            parts and sends the sum, in fp32, to d; d sums the nodes, and its own node's ranks,
            in their order. So each sum crosses between two nodes once
    nccl    torch.distributed's own, in another order of sums; shards of one size only

Signals (SET to the call's epoch e; each is waited for in the call that sets it)
    partials_ready[d * lanes + l]     the running sum of shard d is in this slot (ring). By the
                                      rank before
    parts_ready[(group * node + seat) * lanes + l]   the part of the rank with this seat, of the
                                      shard that has this group, is in this slot (relay). By it
    partials_ready[node * lanes + l]  the sum of that node is in this slot (relay). By the partner
    slot_free, epoch, ticket          the slot's; the last program moves them
Pieces without rows are signalled too. Those of push, packets and pull are the mailbox's
(weft.tiles.postbox). All ranks have read x when a call ends.

Limits  x is contiguous and has the same rows on every rank; packets and pull need all ranks on one
        node
Source  the design's section 4; NCCL's ring
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from weft.base.card import Op, Trial, trials
from weft.base.dtypes import DTYPES
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.compiler import layouts
from weft.ops import _baselines, _lanes, _operations
from weft.runtime.world import World
from weft.tiles import exchange, fetch, move, packets, relay


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once: sums in fp32 in the order of ranks, rounded once."""
    total = inputs[0]["x"].float()
    for one in inputs[1:]:
        total = total + one["x"].float()
    shards = (slice(*problem.shard(rank)) for rank in range(problem.num_ranks))
    return [total[rows].to(problem.torch_dtype) for rows in shards]


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_lanes.Rows):
    """m rows of n elements on every rank, of which each gets the sums of its shard."""

    op = "reduce_scatter"

    @property
    def moved_bytes(self) -> int:
        """What one rank sends when all shards are full."""
        return (self.m - min(self.rows, self.m)) * self.row_bytes

    @property
    def flops(self) -> int:
        """Of one rank."""
        return (self.num_ranks - 1) * self.rows * self.n

    @property
    def groups(self) -> relay.Groups:
        """How parts lie in a relay's slot."""
        largest = max(self.nodes)
        return relay.Groups(len(self.nodes), largest, math.ceil(largest / min(self.nodes)))


@dataclass(frozen=True)
class Config(_lanes.Lanes):
    """How the parts are moved and summed; `transport` as the Plan says."""

    transport: str = "push"
    reaches_far = {
        "push": True, "relay": True, "ring": True, "packets": False, "pull": False,
    }  # fmt: skip


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    item_bytes = problem.itemsize
    yield from _lanes.candidates(Config, problem, target, problem.shard_bytes, item_bytes)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The host

PROGRAMS = {
    "push": exchange.push, "packets": packets.push_packets, "pull": fetch.pull,
    "relay": relay.relay_sums, "ring": relay.ring_sums,
}  # fmt: skip
BY_STEPS = ("push", "packets", "pull")
SCATTER = {"to_all": False, "sums": True}


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
    if _operations.is_asked(x):
        return _operations.as_operation("reduce_scatter", world, (x,), config=config, out=out)
    call = _lanes.find_call(world, "reduce_scatter", (x, out), (config,), _Call)
    if out is None:
        out = torch.empty(call.out_shape, dtype=x.dtype, device=x.device)
    else:
        increment_version((out,))
    if not call.is_empty:
        call.launch(world, x, out)
    return out


class _Call:
    """What calls with tensors like these share on one rank."""

    def __init__(self, world: World, x: Any, out: Any, config: Any) -> None:
        layouts.check_tensor("reduce_scatter", "x", x, world)
        n = math.prod(x.shape[1:])
        self.problem = problem = Problem(
            x.shape[0], n, world.num_ranks, str(x.dtype), _lanes.nodes_of(world),
            in_place=_lanes.is_on_heap(world, x),
        )  # fmt: skip
        self.config = config = config or choose(problem, world.target)
        config.check(problem, world.target)
        first, end = problem.shard(world.rank)
        self.out_shape = (end - first, *x.shape[1:])
        if out is not None:
            _lanes.check_out("reduce_scatter", out, self.out_shape, x.dtype, world)
        self.name = _lanes.name_of(world, problem, config, x)
        self.shards = move.Shards(problem.m * n, problem.rows * n)
        self.is_empty = problem.is_empty
        self._start: Any = None
        if not config.by_library and config.transport not in BY_STEPS:
            self.buffers, self.signals = _workspace(problem, config)
        self.extra = (problem.groups,) if config.transport == "relay" else ()

    def launch(self, world: World, x: torch.Tensor, out: torch.Tensor) -> None:
        world.operator_call(self.name, self.tensors)
        if self._start is None:  # behind operator_call: it takes memory, which is collective
            self._start = self._prepare(world)
        self._start(x, out)

    def _prepare(self, world: World) -> Any:
        if self.config.by_library:
            return _lanes.by_library("reduce_scatter", world)
        if self.config.transport in BY_STEPS:
            return self._exchange().launches(world, self.config)
        return partial(self._by_slot, world)

    def _exchange(self) -> _lanes.Exchange:
        problem, is_pull = self.problem, self.config.transport == "pull"
        num_bytes = problem.m * problem.row_bytes
        return _lanes.Exchange(
            fn=PROGRAMS[self.config.transport],
            part_bytes=problem.shard_bytes,
            align_bytes=problem.row_bytes,
            word_bytes=problem.itemsize,
            shards=((num_bytes, problem.shard_bytes), None),
            dtype=problem.torch_dtype,
            memory=(0 if problem.in_place else num_bytes) if is_pull else None,
            constants=(*((problem.in_place,) if is_pull else ()), *SCATTER.values()),
        )

    def _by_slot(self, world: World, x: torch.Tensor, out: torch.Tensor) -> None:
        problem, config = self.problem, self.config
        # Each transport has a slot of its own shape.
        slot = world.workspace(f"reduce_scatter.{config.transport}", self.buffers, self.signals)
        width = _lanes.width_of(problem.row_bytes, x, out)
        arrays = [getattr(slot, name) for name in (*self.buffers, *self.signals)]
        PROGRAMS[config.transport][(config.lanes,)](
            x, out, *arrays, slot.arg, self.shards, *self.extra, world.arg, block=config.block,
            vec=_lanes.elements_in_vector(width, problem.itemsize), **config.options(world.target),
        )  # fmt: skip


def _workspace(problem: Problem, config: Config) -> tuple[dict, dict]:
    """The buffers and signals of a transport, in the order of its kernel's parameters."""
    shard, groups = problem.rows * problem.n, problem.groups
    in_group = groups.num_nodes * groups.per_node * groups.largest
    parts = {"ring": 0, "relay": in_group}
    partials = {"ring": problem.num_ranks, "relay": groups.num_nodes}
    counts = {"parts": parts[config.transport], "partials": partials[config.transport]}
    dtypes = {"parts": problem.torch_dtype, "partials": torch.float32}
    buffers = {x: ((counts[x] * shard,), dtypes[x]) for x in counts if counts[x]}
    signals = {f"{x}_ready": (counts[x] * config.lanes, torch.int64) for x in buffers}
    return buffers, signals


# ---------------------------------------------------------------------------------------------
# The card


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    return reduce_scatter(inputs["x"], world=world, config=config)


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or choose(problem, target)
    config.check(problem, target)
    if config.by_library:
        return
    element = f"*{DTYPES[problem.dtype].triton}"
    words = {"x": element, "out": element, "boxes": element, "staged": element,
             "parts": element, "partials": "*fp32", "parts_ready": "*i64",
             "partials_ready": "*i64"}  # fmt: skip
    width = _lanes.width_of(problem.row_bytes)
    yield _lanes.record("reduce_scatter", PROGRAMS[config.transport], words, problem, config,
                        target, groups=problem.groups, in_place=problem.in_place,
                        incoming=None, **SCATTER,
                        width=min(_lanes.PACKET_BYTES, width),
                        vec=_lanes.elements_in_vector(width, problem.itemsize))  # fmt: skip


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """A rank's result: its shape and dtype, without its values."""
    first, end = problem.shard(rank)
    return torch.empty((end - first, problem.n), dtype=problem.torch_dtype, device="meta")


op = Op(
    name="reduce_scatter",
    summary="out = rows of this rank of sum(x over ranks)",
    problem=Problem,
    config=Config,
    make_problem=partial(_lanes.make_problem, Problem),
    make_inputs=_lanes.make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=kernels,
    default_shape={"m": 256, "n": 256},
    smallest_config={"block": 16},
    trials=(
        *trials({"m": 8, "n": 40}),
        Trial((3,), {"m": 6, "n": 40}, "pull", on_heap=True),
    ),
    awkward_shapes=(
        (4, {"m": 388, "n": 96}),
        (3, {"m": 291, "n": 7}),
        (2, {"m": 2, "n": 64}),
        (1, {"m": 40, "n": 48}),
        (8, {"m": 9, "n": 5}),
        (4, {"m": 1, "n": 1}),
        (4, {"m": 0, "n": 16}),
    ),
    baselines=_baselines.REDUCE_SCATTER,
    fake=fake,
    backward=("all_gather",),
    takes_nodes=True,
)
