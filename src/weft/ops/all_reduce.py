"""All-reduce: out = x of rank 0 + x of rank 1 + ..., on every rank, the same bits everywhere.

Sums are in fp32, in the order of ranks, and rounded once: both transports give the same bits.

Plan, in lanes (weft.tiles.move): lane l deals with piece l
    one_shot    own piece -> every rank's slot; every rank sums all of it. One step, for small x
    two_shot    x is cut into shares, one for each rank: piece of each share -> its rank's slot;
                that rank sums its share and sends it to all; then slot -> out

Signals (SET to the call's epoch e; each is waited for in the call that sets it)
    parts_ready[src * lanes + l]    piece l of src's x (one_shot), or of src's part of this rank's
                                    share (two_shot), is in this rank's slot
    sums_ready[src * lanes + l]     piece l of the sum of src's share is in this rank's slot
    slot_free, epoch, ticket        the slot's; the last program moves them
Pieces without elements are signalled too.

Limits  x is contiguous and of one shape on all ranks
Source  the design's section 4; the names are NCCL's and TensorRT-LLM's
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.card import Op
from weft.base.dtypes import DTYPES
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.ops import _baselines, _lanes
from weft.tiles import move, reduce

SUPPORTED = ("float16", "bfloat16", "float32")

# Up to so many bytes every rank sums everything: a second step costs more than it spares.
ONE_SHOT_BYTES = 256 << 10


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
    dtypes = SUPPORTED

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
        return math.ceil(math.ceil(self.total / self.num_ranks) / line) * line

    @property
    def shard_bytes(self) -> int:
        """What a lane takes its part of."""
        return self.share * self.itemsize

    @property
    def flops(self) -> int:
        """Of one rank, in two_shot."""
        return (self.num_ranks - 1) * self.share


@dataclass(frozen=True)
class Config(_lanes.Lanes):
    """How the parts are moved and summed; `transport` as the Plan says."""

    transport: str = "one_shot"
    reaches_far = {"one_shot": True, "two_shot": True}


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    first = "one_shot" if problem.total_bytes <= ONE_SHOT_BYTES else "two_shot"
    yield from _lanes.candidates(Config, problem, target, first, problem.itemsize)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The program


@triton.jit
def _one_shot(x, out, parts, parts_ready, slot, shards, world, block: tl.constexpr,
              vec: tl.constexpr):  # fmt: skip
    rank, e = wl.rank(world), move.begin(world, slot)
    whole = move.Shards(shards.total, shards.total)
    stride = tl.cast(shards.total, tl.int64) // vec * vec
    piece = move.own_piece(x, whole, 0, vec)
    for hop in range(1, world.num_ranks):
        to = (rank + hop) % world.num_ranks
        received = parts + stride * rank + piece.offset
        move.send(world, received, x + piece.first, piece.size, to, block)
        wl.notify(world, move.word_of(parts_ready, rank), e, to=to, op=wl.SignalOp.SET)
    move.await_others(world, parts_ready, e)  # pairs with the notify above
    reduce.reduce(
        piece.size, world.num_ranks,
        reduce.load_part, reduce.Parts(x + piece.first, parts + piece.offset, stride, rank),
        reduce.emit_store, reduce.Stored(out + piece.first), block,
    )  # fmt: skip
    move.end(world, slot, e)


class Shared(NamedTuple):
    """Arguments of `_emit_to_all`."""

    out: Any
    sums: Any
    rank: Any
    world: Any


@triton.jit
def _emit_to_all(i, total, mask, args):
    """The sum, rounded once, to every rank. args: Shared"""
    value = total.to(args.out.dtype.element_ty)
    for hop in range(1, args.world.num_ranks):
        to = (args.rank + hop) % args.world.num_ranks
        wl.put(args.world, args.sums + i, value, to=to, mask=mask)
    tl.store(args.out + i, value, mask=mask)


@triton.jit
def _two_shot(x, out, parts, sums, parts_ready, sums_ready, slot, shards, world,
              block: tl.constexpr, vec: tl.constexpr):  # fmt: skip
    rank, e = wl.rank(world), move.begin(world, slot)
    stride = tl.cast(shards.shard, tl.int64) // vec * vec
    for hop in range(1, world.num_ranks):
        to = (rank + hop) % world.num_ranks
        piece = move.own_piece(x, shards, to, vec)
        received = parts + stride * rank + piece.offset
        move.send(world, received, x + piece.first, piece.size, to, block)
        wl.notify(world, move.word_of(parts_ready, rank), e, to=to, op=wl.SignalOp.SET)
    own = move.own_piece(x, shards, rank, vec)
    move.await_others(world, parts_ready, e)  # pairs with the notify above
    reduce.reduce(
        own.size, world.num_ranks,
        reduce.load_part, reduce.Parts(x + own.first, parts + own.offset, stride, rank),
        _emit_to_all, Shared(out + own.first, sums + own.first, rank, world), block,
    )  # fmt: skip
    for hop in range(1, world.num_ranks):
        to = (rank + hop) % world.num_ranks
        wl.notify(world, move.word_of(sums_ready, rank), e, to=to, op=wl.SignalOp.SET)
    for hop in range(1, world.num_ranks):
        source = (rank + world.num_ranks - hop) % world.num_ranks
        piece = move.own_piece(x, shards, source, vec)
        wl.wait(move.word_of(sums_ready, source), e, world=world)  # pairs with the notify above
        move.copy(out + piece.first, sums + piece.first, piece.size, block)
    move.end(world, slot, e)


# ---------------------------------------------------------------------------------------------
# The host


def all_reduce(
    x: torch.Tensor, *, world: Any, config: Config | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of all ranks' tensors, the same bits on every rank. Collective.

        out = x of rank 0 + x of rank 1 + ...

    Shapes  x: any shape but a scalar, contiguous, the same on all ranks; out may be x
    Dtypes  float16, bfloat16 or float32; sums in fp32, rounded once
    Sync    stream-ordered on the current stream; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    call = _lanes.find_call(
        world, "all_reduce", (x, out), (config,), lambda: _Call(world, x, config, out)
    )
    if out is None:
        out = torch.empty_like(x)
    if not call.problem.is_empty:
        call.launch(world, x, out)
    return out


_PROGRAMS = {"one_shot": _one_shot, "two_shot": _two_shot}


class _Call:
    """What calls with tensors like these share on one rank."""

    def __init__(self, world: Any, x: Any, config: Any, out: Any) -> None:
        _lanes.check_tensor("all_reduce", "x", x, world)
        if out is not None:
            _lanes.check_out("all_reduce", out, x.shape, x.dtype, world)
        n = math.prod(x.shape[1:])
        self.problem = problem = Problem(
            x.shape[0], n, world.num_ranks, str(x.dtype), _lanes.nodes_of(world)
        )
        self.config = config = config or choose(problem, world.target)
        config.check(problem, world.target)
        self.name = f"all_reduce m={problem.m},n={n} {problem.dtype} {config}"
        self.shards = move.Shards(problem.total, problem.share)
        words = (world.num_ranks * config.lanes, torch.int64)
        size = problem.total if config.transport == "one_shot" else problem.share
        self.buffers = {"parts": ((world.num_ranks * size,), problem.torch_dtype)}
        self.signals = {"parts_ready": words}
        if config.transport == "two_shot":
            self.buffers["sums"] = ((problem.total,), problem.torch_dtype)
            self.signals["sums_ready"] = words

    def launch(self, world: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        problem, config = self.problem, self.config
        world.operator_call(self.name)
        # Each transport has a slot of its own shape.
        slot = world.workspace(f"all_reduce.{config.transport}", self.buffers, self.signals)
        width = _lanes.width_of(problem.total_bytes, x, out)
        arrays = [getattr(slot, name) for name in (*self.buffers, *self.signals)]
        _PROGRAMS[config.transport][(config.lanes,)](
            x, out, *arrays, slot.arg, self.shards, world.arg, block=config.block,
            vec=_lanes.elements_in_vector(width, problem.itemsize), num_warps=config.num_warps,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The card


def make_problem(
    num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Problem:
    return Problem(shape["m"], shape["n"], num_ranks, dtype, nodes)


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random tensor on the CPU: the same for one seed on every machine."""
    return {"x": _lanes.random_rows(problem, rank, problem.m, seed)}


def run(
    world: Any, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    return all_reduce(inputs["x"], world=world, config=config)


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or choose(problem, target)
    config.check(problem, target)
    element = f"*{DTYPES[problem.dtype].triton}"
    words = {"x": element, "out": element, "parts": element, "sums": element,
             "parts_ready": "*i64", "sums_ready": "*i64"}  # fmt: skip
    vec = _lanes.elements_in_vector(_lanes.width_of(problem.total_bytes), problem.itemsize)
    yield _lanes.record("all_reduce", _PROGRAMS[config.transport], words, problem, config, vec=vec)


def fake(problem: Problem, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The result's shape and dtype, without its values."""
    return torch.empty((problem.m, problem.n), dtype=problem.torch_dtype, device="meta")


op = Op(
    name="all_reduce",
    summary="out[m, n] = sum(x over ranks), on every rank",
    problem=Problem,
    config=Config,
    make_problem=make_problem,
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=kernels,
    default_shape={"m": 256, "n": 256},
    awkward_shapes=(
        (4, {"m": 97, "n": 96}),
        (3, {"m": 291, "n": 7}),
        (2, {"m": 1, "n": 1}),
        (1, {"m": 40, "n": 48}),
        (8, {"m": 9, "n": 5}),
        (4, {"m": 0, "n": 16}),
    ),
    dtypes=SUPPORTED,
    baselines=_baselines.ALL_REDUCE,
    fake=fake,
    backward="all_reduce",
    takes_nodes=True,
)
