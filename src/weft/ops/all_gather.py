"""All-gather: out[m, n] = x of rank 0, x of rank 1, ... over each other, on every rank.

m is global and its rows are split as torch.chunk splits them; shards may be empty. Rows are moved
as integers, so any dtype is, bit by bit.

Plan, in lanes (weft.tiles.move): lane l moves piece l of every shard
    push         tile of own rows -> its box on every rank, tile by tile (weft.tiles.exchange);
                 then boxes -> out
    packets      the same, each 32 bits in a word with their flag: no signal and no fence, at
                 twice the bytes
    relay        own piece -> slots of near ranks, and of one partner on each other node, which
                 passes it on to its near ranks; then slot -> out
    ring         own piece -> the next rank's slot; what comes from the rank before goes on to the
                 next, until it has been everywhere; slot -> out on the way
    pull         memory of all ranks -> out: x itself where it is symmetric, else what its rank has
                 staged (weft.tiles.fetch)
    copy_engine  _stage: own piece -> own slot, unless x is symmetric; _announce; copy engines:
                 x or slots of the others -> out; _finish; beside them _keep: own piece -> out
    nccl         torch.distributed's own; shards of one size only
Own rows go from x to out in all of them.

Signals (SET to the call's epoch e; each is waited for in the call that sets it)
    rows_ready[src * lanes + l]  piece l of src's shard is in this rank's slot (relay, ring). Set by
                                 src, its partner on this node (relay), or the rank before (ring)
    rows_ready[src]              src's rows may be fetched (copy_engine). Set by src
    slot_free, epoch, ticket     the slot's; the last program moves them
Pieces without rows are signalled too: who waits need not know the sizes. Those of push, packets and
pull are the mailbox's (weft.tiles.postbox). All ranks have read a symmetric x when a call ends.

Limits  x is contiguous; packets, pull and copy_engine need all ranks on one node
Source  the design's section 4; NCCL's ring, and its LL protocol for packets
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
from weft.tiles import copied, exchange, fetch, move, packets, relay


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once."""
    gathered = torch.cat([one["x"] for one in inputs])
    return [gathered for _ in inputs]


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_lanes.Rows):
    """m rows of n elements over all ranks, each holding its shard."""

    op = "all_gather"
    dtypes = tuple(DTYPES)

    @property
    def moved_bytes(self) -> int:
        """What one rank receives when all shards are full."""
        return (self.m - min(self.rows, self.m)) * self.row_bytes


@dataclass(frozen=True)
class Config(_lanes.Lanes):
    """How the rows are moved; `transport` as the Plan says."""

    transport: str = "push"
    reaches_far = {
        "push": True, "relay": True, "ring": True, "packets": False, "pull": False,
        "copy_engine": False,
    }  # fmt: skip


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    word_bytes = _lanes.word_bytes(problem)
    yield from _lanes.candidates(Config, problem, target, problem.shard_bytes, word_bytes)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The host

PROGRAMS = {
    "push": exchange.push, "packets": packets.push_packets, "pull": fetch.pull,
    "relay": relay.relay_rows, "ring": relay.ring_rows,
}  # fmt: skip
BY_STEPS = ("push", "packets", "pull")
GATHER = {"to_all": True, "sums": False}


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
    if _operations.is_asked(x):
        rows = out.shape[0] if m is None and out is not None and out.dim() else m
        return _operations.as_operation("all_gather", world, (x,), rows, config=config, out=out)
    call = _lanes.find_call(world, "all_gather", (x, out), (m, config), _Call)
    if out is None:
        out = torch.empty(call.out_shape, dtype=x.dtype, device=x.device)
    else:
        increment_version((out,))
    if not call.is_empty:
        call.launch(world, x, out)
    return out


class _Call:
    """What calls with tensors like these share on one rank."""

    def __init__(self, world: World, x: Any, out: Any, m: int | None, config: Any) -> None:
        self.problem = problem = problem_of(world, x, m, out)
        self.config = config = config or choose(problem, world.target)
        config.check(problem, world.target)
        self.name = _lanes.name_of(world, problem, config, x)
        self.out_shape = (problem.m, *x.shape[1:])
        self.buffers = {"gathered": ((problem.m * problem.row_bytes,), torch.uint8)}
        self.signals = {"rows_ready": (world.num_ranks * config.lanes, torch.int64)}
        self.is_empty = problem.is_empty
        self._start: Any = None

    def launch(self, world: World, x: torch.Tensor, out: torch.Tensor) -> None:
        world.operator_call(self.name, self.tensors)
        if self._start is None:  # behind operator_call: it takes memory, which is collective
            self._start = self._prepare(world)
        self._start(x, out)

    def _prepare(self, world: World) -> Any:
        if self.config.by_library:
            return _lanes.by_library("all_gather", world)
        if self.config.transport in BY_STEPS:
            return self._exchange().launches(world, self.config)
        if self.config.transport == "copy_engine":
            return _CopyEngine(world, self.problem, self.config)
        return partial(self._by_slot, world)

    def _exchange(self) -> _lanes.Exchange:
        problem, is_pull = self.problem, self.config.transport == "pull"
        return _lanes.Exchange(
            fn=PROGRAMS[self.config.transport],
            part_bytes=problem.shard_bytes,
            align_bytes=problem.row_bytes,
            word_bytes=_lanes.word_bytes(problem),
            shards=((problem.m * problem.row_bytes, problem.shard_bytes), None),
            memory=(0 if problem.in_place else problem.shard_bytes) if is_pull else None,
            constants=(*((problem.in_place,) if is_pull else ()), *GATHER.values()),
        )

    def _by_slot(self, world: World, x: torch.Tensor, out: torch.Tensor) -> None:
        problem, config = self.problem, self.config
        slot = world.workspace("all_gather", self.buffers, self.signals)
        width = _lanes.width_of(problem.row_bytes, x, out)
        x, result, gathered = _lanes.as_words(width, x, out, slot.gathered)
        PROGRAMS[config.transport][(config.lanes,)](
            x, result, gathered, slot.rows_ready, slot.arg, _shards(problem, width), world.arg,
            block=config.block, vec=_lanes.words_in_vector(width), **config.options(world.target),
        )  # fmt: skip


class _CopyEngine:
    """What a call by copy engines queues; recorded once it has come a few times."""

    def __init__(self, world: World, problem: Problem, config: Config) -> None:
        self.world, self.problem, self.config = world, problem, config
        staged = 0 if problem.in_place else problem.shard_bytes
        self.buffers = {"staged": ((max(staged, _lanes.VECTOR_BYTES),), torch.uint8)}
        self.signals = {"rows_ready": (world.num_ranks, torch.int64)}
        self.replays = world.replays()

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        slot = self.world.workspace("all_gather.copy_engine", self.buffers, self.signals)
        self.replays.run(
            (slot.number, x.data_ptr(), out.data_ptr()), lambda: self._queue(slot, x, out)
        )

    def _queue(self, slot: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        problem, world, config = self.problem, self.world, self.config
        main, copier = world.current_stream(), world.stream("copy")
        width = _lanes.width_of(problem.row_bytes, x, out)
        own, result, staged = _lanes.as_words(width, x, out, slot.staged)
        about = (_shards(problem, width), world.arg, config.block, _lanes.words_in_vector(width))
        if not problem.in_place:
            copied.stage[(config.lanes,)](
                own, staged, slot.arg, *about, num_warps=config.num_warps
            )  # fmt: skip
        copier.wait(main)
        with copier:
            copied.announce[(1,)](slot.rows_ready, slot.arg, world.arg, num_warps=1)
        copied.keep[(config.lanes,)](own, result, *about, num_warps=config.num_warps)
        with copier:
            self._copy(x if problem.in_place else slot.staged, out)
            copied.finish[(1,)](slot.arg, world.arg, problem.in_place, num_warps=1)
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


def _shards(problem: Problem, width: int) -> move.Shards:
    word = min(width, 8)
    return move.Shards(problem.m * problem.row_bytes // word, problem.shard_bytes // word)


def problem_of(world: World, x: Any, m: int | None = None, out: Any = None) -> Problem:
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    layouts.check_tensor("all_gather", "x", x, world)
    rows, n = x.shape[0], math.prod(x.shape[1:])
    sized_by = out if m is None and out is not None and out.dim() else None
    if m is None:
        m = rows * world.num_ranks if sized_by is None else sized_by.shape[0]
    problem = Problem(
        m, n, world.num_ranks, str(x.dtype), _lanes.nodes_of(world),
        # An empty shard lies nowhere.
        in_place=m == rows * world.num_ranks and _lanes.is_on_heap(world, x),
    )  # fmt: skip
    _lanes.check_shard("all_gather", "x", rows, problem, world, sized_by)
    if out is not None:
        _lanes.check_out("all_gather", out, (m, *x.shape[1:]), x.dtype, world)
    return problem


# ---------------------------------------------------------------------------------------------
# The card


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random tensor on the CPU: the same for one seed on every machine."""
    first, end = problem.shard(rank)
    return {"x": _lanes.random_rows(problem, rank, end - first, seed)}


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    return all_gather(inputs["x"], world=world, m=problem.m, config=config)


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernels that a call with this configuration launches, as records."""
    config = config or choose(problem, target)
    config.check(problem, target)
    width = _lanes.width_of(problem.row_bytes)
    word = f"*i{8 * min(width, 8)}"
    if config.by_packets:
        word = f"*i{8 * min(width, _lanes.PACKET_BYTES)}"
    words = {"x": word, "out": word, "gathered": word, "boxes": word, "staged": word,
             "rows_ready": "*i64"}  # fmt: skip
    if config.transport == "copy_engine":
        fns = [copied.stage, copied.announce, copied.keep, copied.finish]
    else:
        fns = [] if config.by_library else [PROGRAMS[config.transport]]
    for fn in fns:
        yield _lanes.record("all_gather", fn, words, problem, config, target,
                            vec=_lanes.words_in_vector(width), in_place=problem.in_place,
                            incoming=None, width=min(_lanes.PACKET_BYTES, width),
                            **GATHER)  # fmt: skip


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """The result's shape and dtype, without its values."""
    return torch.empty((problem.m, problem.n), dtype=problem.torch_dtype, device="meta")


op = Op(
    name="all_gather",
    summary="out[m, n] = all_gather(x over rows)",
    problem=Problem,
    config=Config,
    make_problem=partial(_lanes.make_problem, Problem),
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=kernels,
    default_shape={"m": 256, "n": 256},
    smallest={"m": 2, "n": 64},
    smallest_config={"block": 16},
    trials=(
        *trials({"m": 8, "n": 40}),
        Trial((3,), {"m": 6, "n": 40}, "pull", on_heap=True),
        Trial((3,), {"m": 6, "n": 40}, "copy_engine", on_heap=True),
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
    dtypes=Problem.dtypes,
    baselines=_baselines.ALL_GATHER,
    fake=fake,
    backward=("reduce_scatter",),
    takes_nodes=True,
)
