"""All-reduce: out = x of rank 0 + x of rank 1 + ..., on every rank, the same bits everywhere.

Sums are in fp32, in the order of ranks, and rounded once: all transports but relay between nodes,
and nccl, give the same bits.

Plan, in lanes, tile by tile (weft.tiles.exchange)
    one_shot    tile of own x -> its box on every rank; every rank sums all tiles. One step a tile
    two_shot    x is cut into shares, one for each rank: tile of each share -> its box on that rank,
                which sums it and sends the sum to all; then boxes -> out
    pull        x is cut into shares: every rank sums its share of what lies in the memory of all
                ranks, x itself where it is symmetric, else what its rank has staged, and puts the
                sum into every rank's out where that is symmetric, else beside it (weft.tiles.fetch)
    relay       reduce_scatter by relay, then all_gather by relay: of each shard of x, one sum of a
                node crosses to each other node, once
    nccl        torch.distributed's own, in another order of sums
    one_shot_packets, two_shot_packets    as those, each 32 bits in a word with their flag: no
                signal and no fence, at twice the bytes

Signals are the mailbox's (weft.tiles.postbox): arrived[l * num_ranks + src], the steps of lane l of
src that are here; or the flag in each packet. Tiles without elements are signalled too. A relay's
are those of its two operators.

Limits  x is contiguous and of one shape on all ranks; packets need all ranks on one node
Source  the design's section 4; the names are NCCL's and TensorRT-LLM's
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from weft.base.card import Op, Trial, trials
from weft.base.dtypes import DTYPES
from weft.base.parts import full_part
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.compiler import layouts
from weft.ops import _baselines, _lanes, _operations, all_gather, reduce_scatter
from weft.runtime.world import World
from weft.tiles import exchange, fetch, move, packets

# From here on sums are relayed between nodes; not measured, for want of a network.
RELAYED_BYTES = 1 << 16


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once: sums in fp32 in the order of ranks, rounded once."""
    total = inputs[0]["x"].float()
    for one in inputs[1:]:
        total = total + one["x"].float()
    return [total.to(problem.torch_dtype) for _ in inputs]


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_lanes.Rows):
    """m rows of n elements on every rank."""

    op = "all_reduce"

    @property
    def total(self) -> int:
        return self.m * self.n

    @property
    def total_bytes(self) -> int:
        return self.total * self.itemsize

    @property
    def share(self) -> int:
        """Elements that one rank sums in two_shot; shares begin where pieces may."""
        line = move.LINE_BYTES.value // self.itemsize
        return math.ceil(full_part(self.total, self.num_ranks) / line) * line

    @property
    def shard_bytes(self) -> int:
        """What a lane takes its part of."""
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


@dataclass(frozen=True)
class Config(_lanes.Lanes):
    """How the parts are moved and summed; `transport` as the Plan says."""

    transport: str = "one_shot"
    reaches_far = {
        "one_shot": True, "two_shot": True, "one_shot_packets": False, "two_shot_packets": False,
        "pull": False, "relay": True,
    }  # fmt: skip


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    item_bytes = problem.itemsize
    found = list(_lanes.candidates(Config, problem, target, problem.total_bytes, item_bytes))
    if problem.total_bytes < RELAYED_BYTES:
        # Four hops to save bytes where there are few.
        found.sort(key=lambda config: config.transport == "relay")
    yield from found


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The host

PROGRAMS = {
    "one_shot": exchange.push, "two_shot": exchange.push_twice,
    "one_shot_packets": packets.push_packets, "two_shot_packets": packets.push_packets_twice,
    "pull": fetch.pull_twice,
}  # fmt: skip
ONE_SHOT = {"to_all": True, "sums": True}


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
    if _operations.is_asked(x):
        return _operations.as_operation("all_reduce", world, (x,), config=config, out=out)
    call = _lanes.find_call(world, "all_reduce", (x, out), (config,), _Call)
    if out is None:
        out = torch.empty_like(x)
    else:
        increment_version((out,))
    if not call.is_empty:
        call.launch(world, x, out)
    return out


class _Call:
    """What calls with tensors like these share on one rank."""

    def __init__(self, world: World, x: Any, out: Any, config: Any) -> None:
        layouts.check_tensor("all_reduce", "x", x, world)
        if out is not None:
            _lanes.check_out("all_reduce", out, x.shape, x.dtype, world)
        n = math.prod(x.shape[1:])
        self.problem = problem = Problem(
            x.shape[0], n, world.num_ranks, str(x.dtype), _lanes.nodes_of(world),
            in_place=_lanes.is_on_heap(world, x),
        )  # fmt: skip
        self.config = config = config or choose(problem, world.target)
        config.check(problem, world.target)
        self.shares_out = out is not None and _lanes.is_on_heap(world, out)
        self.name = _lanes.name_of(world, problem, config, x, out)
        self.is_empty = problem.is_empty
        self._start: Any = None

    def launch(self, world: World, x: torch.Tensor, out: torch.Tensor) -> None:
        world.operator_call(self.name, self.tensors)
        if self._start is None:  # behind operator_call: it takes memory, which is collective
            if self.config.by_library:
                self._start = _lanes.by_library("all_reduce", world)
            elif self.config.transport == "relay":
                self._start = partial(self._relay, world)
            else:
                self._start = self._exchange().launches(world, self.config)
        self._start(x, out)

    def _relay(self, world: World, x: torch.Tensor, out: torch.Tensor) -> None:
        scatter, gather = _relayed(self.problem, self.config)
        shape = (scatter.problem.m, scatter.problem.n)
        shard = reduce_scatter(x.view(shape), world=world, config=scatter.config)
        all_gather(shard, world=world, m=shape[0], config=gather.config, out=out.view(shape))

    def _exchange(self) -> _lanes.Exchange:
        problem, transport = self.problem, self.config.transport
        return _lanes.Exchange(
            fn=PROGRAMS[transport],
            part_bytes=problem.total_bytes if "one_shot" in transport else problem.shard_bytes,
            align_bytes=problem.total_bytes,
            word_bytes=problem.itemsize,
            shards=(
                (problem.total_bytes, problem.shard_bytes),
                *((None,) if "one_shot" in transport else ()),
            ),
            dtype=problem.torch_dtype,
            boxes=2 if transport == "two_shot" else 1,
            memory=self._memory() if transport == "pull" else None,
            constants=self._constants(),
        )

    def _constants(self) -> tuple:
        if self.config.transport == "pull":
            return self.problem.in_place, self.shares_out
        return tuple(ONE_SHOT.values()) if "one_shot" in self.config.transport else ()

    def _memory(self) -> int:
        """Bytes of what is staged, and of what comes of others' sums."""
        copies = (not self.problem.in_place) + (not self.shares_out)
        return copies * self.problem.num_ranks * self.problem.shard_bytes


class _Half(NamedTuple):
    """One of the two operators that a relay is made of."""

    problem: Any
    config: Any
    kernels: Any


def _relayed(problem: Problem, config: Config) -> tuple[_Half, _Half]:
    """Elements as rows of up to a line, so that shards are cut as lanes like it."""
    n = math.gcd(problem.total, move.LINE_BYTES.value // problem.itemsize)
    shape = (problem.total // n, n, problem.num_ranks, problem.dtype, problem.nodes)
    halves = []
    for module in map(importlib.import_module, ("weft.ops.reduce_scatter", "weft.ops.all_gather")):
        part = module.Problem(*shape)
        block = config.block
        if part.op == "all_gather":
            block = max(16, block * problem.itemsize // _lanes.word_bytes(part))
        parts_config = module.Config("relay", config.lanes, block, config.num_warps)
        halves.append(_Half(part, parts_config, module.kernels))
    return halves[0], halves[1]


# ---------------------------------------------------------------------------------------------
# The card


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    return all_reduce(inputs["x"], world=world, config=config)


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or choose(problem, target)
    config.check(problem, target)
    element = f"*{DTYPES[problem.dtype].triton}"
    if config.by_library:
        return
    if config.transport == "relay":
        for half in _relayed(problem, config):
            yield from half.kernels(half.problem, half.config, target)
        return
    words = {"x": element, "out": element, "boxes": element, "memory": element}
    width = _lanes.width_of(problem.total_bytes)
    vec = _lanes.elements_in_vector(width, problem.itemsize)
    yield _lanes.record("all_reduce", PROGRAMS[config.transport], words, problem, config, target,
                        vec=vec, width=min(_lanes.PACKET_BYTES, width), in_place=problem.in_place,
                        shares_out=False, incoming=None, **ONE_SHOT)  # fmt: skip


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """The result's shape and dtype, without its values."""
    return torch.empty((problem.m, problem.n), dtype=problem.torch_dtype, device="meta")


op = Op(
    name="all_reduce",
    summary="out[m, n] = sum(x over ranks), on every rank",
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
        (4, {"m": 97, "n": 96}),
        (3, {"m": 291, "n": 7}),
        (2, {"m": 1, "n": 1}),
        (1, {"m": 40, "n": 48}),
        (8, {"m": 9, "n": 5}),
        (4, {"m": 0, "n": 16}),
    ),
    baselines=_baselines.ALL_REDUCE,
    fake=fake,
    backward=(),
    takes_nodes=True,
    composed=("relay",),
)
