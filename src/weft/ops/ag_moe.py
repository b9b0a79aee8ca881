"""All-gather of tokens, then the product with each one's experts, as one operator.

    out[slot, :]  =  x of all ranks[token_of[slot], :] @ b[expert of slot]

m tokens are split as torch.chunk splits them. Every rank has n columns of every expert and ends
with its columns of all m * top_k slots, in the order of moe_route: sorted by expert. Which slots an
expert has is known on the device alone.

Plan, `put` (many tokens, on GPUs of one node)
    stage     a kernel first: every rank's slot is free; own tokens -> the own slot, own words
    puts      copy engines: own tokens -> rank - 1's slot, - 2's, ..; behind each a word
    multiply  as below, without feeders

Plan, `push`: one kernel on each rank, the GEMM template with hooks (weft.tiles.hooks.table)
    feeders   the first `lanes` programs: store own tokens in every rank's slot, the own one first,
              then rank + 1's, + 2's, ..; then they multiply too, what is left of each round
    order     tiles by the table, in the turns of moe_route: those of own tokens first, then those
              whose last tokens come next
    ready     waits for the ranks whose tokens are in the tile, and for no other
    emit      slots -> out

Signals (SET to the call's epoch e, read on the device; waited for in the call that sets it)
    rows_ready[src * lanes + l]   push: what lane l of rank src stores of its tokens is in this
                                  rank's slot. By src
    rows_ready[src]               put: src's tokens are. By src's engine; own ones by stage
    shard_ready[rank]             put: here alone, what the engine copies as that word
    summed[2 * program + half]    local: sums for another program's tile are there        (sm90)
    slot_free, epoch, ticket      the slot's; the last program moves them
Ranks without tokens are the last ones: no tile waits for them, and they put nothing. All other
words are waited for by some tile, so none is still on its way when the slot is given back.

Limits  x is contiguous, b is [experts, k, n] or a transposed [experts, n, k]; the template for
        Hopper takes tables of tile_m=128 and k in multiples of 64
Source  docs/decisions/009-hooks.md; Triton-distributed's AG-MoE for the idea
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

import weft.language as wl
from weft.base.card import Op, Trial, trials
from weft.base.errors import ConfigError, ShapeError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.compiler.lower import source
from weft.ir import core
from weft.language import mapping, slots
from weft.ops import _baselines, _lanes, _moe, _operations, _records
from weft.ops._ag_gemm_call import STAGE_WARPS, put_beside
from weft.ops._ag_gemm_config import Shards
from weft.ops._ag_gemm_rows import feed
from weft.ops.moe_route import Routing
from weft.plan.launches import Start
from weft.runtime.world import World
from weft.tiles import blocking, gemm
from weft.tiles.hooks.table import Tables

# From so many bytes of own tokens on, engines bring them: a few microseconds' worth of links.
PUT_BYTES = 1 << 20
# Elements that a program of `stage` copies at once.
BLOCK = 8192


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32."""
    tokens = torch.cat([one["x"] for one in inputs]).float()
    return [_moe.product(problem, tokens[one["token_of"].long()], one) for one in inputs]


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_moe.Problem):
    """m tokens of k elements over all ranks; n columns of every expert on each rank."""

    op = "ag_moe"


@dataclass(frozen=True)
class Config(_moe.Config):
    """Units   lanes: of push, programs that store own tokens before they multiply"""

    lanes: int = 8

    transports = ("push", "put")
    templates = ("plain", "sm90")

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        super().check(problem, target)
        if not 1 <= self.lanes <= target.num_sms:
            raise ConfigError(
                f"ag_moe: lanes={self.lanes}; {target} runs 1 to {target.num_sms} programs together"
            )
        if self.transport == "put" and len(problem.nodes) > 1:
            raise ConfigError(
                f"ag_moe: transport='put' on {len(problem.nodes)} nodes; copy engines reach the "
                "ranks of one node only: take transport='push'"
            )

    @property
    def words(self) -> int:
        """Signals by which a rank says that its tokens are there."""
        return self.lanes if self.transport == "push" else 1

    def grid(self, problem: Problem, target: Target) -> int:
        """Programs: all of them are resident."""
        feeders = self.lanes if self.transport == "push" else 0
        return min(feeders + super().grid(problem, target), target.num_sms)


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    for config in _moe.candidates(Config, problem, target):
        pushed = replace(config, lanes=2) if target.backend == "emu" else config
        ways = [pushed]
        if len(problem.nodes) <= 1 and problem.num_ranks > 1:
            ways.append(replace(pushed, transport="put"))
        is_much = problem.rows * problem.k * problem.itemsize >= PUT_BYTES
        yield from ways[::-1] if is_much and config.template == "sm90" else ways


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The programs


# Hooks of the GEMM template, from which the kernels are generated
# (docs/generated_kernels.md).
KERNEL = core.require(
    core.parse("""\
program(ag_moe_multiply)
x = param(pointer, by='own tokens')
b = param(operand)
out = param(pointer)
gathered = param(pointer)
rows_ready = param(signals, by=kernel, to=kernel, announces=(gathered,))
routing = param(tables, by='moe_route')
slot = param(slot, by=kernel, to=kernel)
world = param(world)
experts = mapping(tables, (routing,), cuts=experts)
template(gemm, (128, 128, 64), formula='out = gather_rows(all_gather(x)) @ b by expert')
credit(begin, slot)
hook(begin, feed, (x, gathered, experts))
notify(begin, rows_ready, each, experts)
hook(order, in_turn, (routing, experts))
wait(ready, rows_ready, sources, experts)
hook(ready, rows_by_token, (gathered, routing))
hook(emit, store_slots, (out,))
finish(end, slot)
""")
)
PUT_KERNEL = core.require(
    core.parse("""\
program(ag_moe_put_multiply)
b = param(operand)
out = param(pointer)
gathered = param(pointer)
rows_ready = param(signals, by=engine, to=kernel, announces=(gathered,))
routing = param(tables, by='moe_route')
slot = param(slot, by=stage, to=kernel)
world = param(world)
experts = mapping(tables, (routing,), cuts=experts)
template(gemm, (128, 128, 64), formula='out = gather_rows(all_gather(x)) @ b by expert')
hook(order, in_turn, (routing, experts))
wait(ready, rows_ready, sources, experts)
hook(ready, rows_by_token, (gathered, routing))
hook(emit, store_slots, (out,))
finish(end, slot)
""")
)


@triton.jit
def stage(x, gathered, rows_ready, shard_ready, slot, shape, shards, world, block: tl.constexpr):
    """Copy own tokens to the own slot, where tiles have them with others'; and have the word that
    engines copy behind them. Product and copies come behind this kernel."""
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    own_first, own_end = mapping.part_of(shape.m, rank, shards.rows)
    first = own_first.to(tl.int64) * shape.k
    size = (own_end - own_first).to(tl.int64) * shape.k
    feed(world, gathered, x, first, first, size, tl.program_id(0), tl.num_programs(0), rank,
         block)  # fmt: skip
    if tl.program_id(0) == 0:
        # weft: equivalent-mutant value+1, narrow of notify: own tokens are there in stream order
        wl.notify(world, rows_ready + rank, e, to=rank, op=wl.SignalOp.SET,
                  order=wl.Order.RELAXED, scope=wl.Scope.DEVICE)  # fmt: skip
        # weft: equivalent-mutant narrow of notify: it orders nothing itself
        wl.notify(world, shard_ready + rank, e, to=rank, op=wl.SignalOp.SET, order=wl.Order.RELAXED)


# ---------------------------------------------------------------------------------------------
# The host


def ag_moe(
    x: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    *,
    world: World,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every token of all ranks times its experts' b, in the order of routing's slots. Collective.

        out[slot] = all_gather(x)[token_of[slot]] @ b[expert of slot]

    Shapes  x: [own tokens, k], contiguous; b: [experts, k, n], contiguous or the transpose of a
            contiguous [experts, n, k]; out: [m * top_k, n]
    Dtypes  all alike, float16, bfloat16 or float32; sums in fp32
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if _operations.is_asked(x, b):
        tensors = (x, b, routing.tables.weight_of, list(routing.tables))
        rest = (routing.tile_m,)
        return _operations.as_operation("ag_moe", world, tensors, *rest, config=config, out=out)
    problem = problem_of(world, x, b, routing, out)
    config = config or choose(problem, world.target)
    config.check(problem, world.target)
    world.operator_call(_moe.call_name(problem, config))
    if out is None:
        out = torch.empty((problem.num_slots, problem.n), dtype=x.dtype, device=x.device)
    else:
        increment_version((out,))
    if problem.is_empty:
        return out.zero_()
    _call_of(world, problem, config).run(world, x, b, out, routing)
    return out


class Call:
    """Launches, copies, and what they are told."""

    def __init__(self, world: Any, problem: Problem, config: Config, kernel: core.Kernel) -> None:
        self.problem, self.config, self.twins = problem, config, source.load(kernel)
        dtype = problem.torch_dtype
        self.buffers = {"gathered": ((problem.m, problem.k), dtype)}
        self.signals = {
            "rows_ready": (problem.num_ranks * config.words, torch.int64),
            "shard_ready": (problem.num_ranks, torch.int64),
        }
        self.is_put = config.transport == "put"
        first, end = problem.shard(world.rank)
        self.has_tokens = first < end
        self.grid = (config.grid(problem, world.target), 1, 1)
        self.num_sms = world.target.num_sms
        if config.template == "sm90":
            sums, summed = config.num_sums(problem, world.target)
            self.buffers["sums"] = ((sums,), torch.float32)
            self.signals["summed"] = (summed, torch.int64)
        self.sizes = (_moe.shape_of(problem), config.experts(problem, config.words))
        self.replays = world.replays()
        self._loaded: set[tuple[bool, ...]] = set()

    def run(self, world: Any, x: Any, b: Any, out: Any, routing: Routing) -> None:
        slot = world.workspace("ag_moe", self.buffers, self.signals)
        tables = Tables.of(routing)
        given = (x, b, out, *tables)
        self.replays.run(
            (*(one.data_ptr() for one in given), slot.number),
            lambda: self._launch(world, slot, x, b, out, tables),
        )

    def _launch(self, world: Any, slot: Any, x: Any, b: Any, out: Any, tables: Any) -> None:
        # Kernels for Hopper read B by TMA, and move 16 bytes at once.
        aligned = blocking.are_aligned(x, b, out)
        multiply = self._multiplying(world, slot, x, b, out, tables, aligned)
        if not self.is_put:
            _start(multiply)
            return
        shards = shards_of(self.problem)
        staged = Start(
            stage, (self.num_sms, 1, 1),
            (x, slot.gathered, slot.rows_ready, slot.shard_ready, slot.arg,
             tokens_of(self.problem), shards, world.arg, BLOCK),
            {"num_warps": STAGE_WARPS},
        )  # fmt: skip
        # Triton specialises kernels by each address.
        kind = tuple(one.data_ptr() % 16 == 0 for one in (x, b, out, *tables))
        if kind not in self._loaded:
            # The product waits for copies, and no binary is loaded while a kernel runs.
            for one in (staged, multiply):
                world.load(one.function, *one.arguments, **one.options)
            self._loaded.add(kind)
        _start(staged)
        if self.has_tokens:
            # What says that slots are free comes before: twelve warps of the product for Hopper
            # have all registers of an SM, and nothing runs beside it.
            copier = put_beside(world, slot, x, self.problem, shards, lambda: _start(multiply))
            # The engines still read x.
            world.current_stream().wait(copier)
        else:
            _start(multiply)

    def _multiplying(
        self, world: Any, slot: Any, x: Any, b: Any, out: Any, tables: Any, aligned: bool
    ) -> Start:
        """The launch of the product."""
        config = self.config
        is_sm90 = config.template == "sm90" and aligned
        tile = config.tile(self.problem, is_sm90)
        arrays = (out, slot.gathered, slot.rows_ready, tables)
        if is_sm90:
            sums = (slot.sums, slot.summed)
            rest = (*sums, slot.arg, *self.sizes, world.arg, tile.m, tile.n, tile.k,
                    config.num_stages, tile.b_is_nk)  # fmt: skip
            arguments = (_moe.describe_b(b, config), *arrays, *rest)
        else:
            arguments = (b, *arrays, slot.arg, *self.sizes, tile.as_constexpr(), world.arg)
        if not self.is_put:
            arguments = (x, *arguments)
        fn = self.twins.sm90 if is_sm90 else self.twins.plain
        return Start(fn, self.grid, arguments, config.options(is_sm90))


def _start(one: Start) -> None:
    one.function[one.grid](*one.arguments, **one.options)


def tokens_of(problem: Problem) -> gemm.Shape:
    """Tokens as what moves them sees them."""
    return gemm.Shape(problem.m, problem.n, problem.k, problem.k, problem.n, problem.n)


def shards_of(problem: Problem) -> Shards:
    """A rank's tokens in one chunk."""
    return Shards(problem.rows, 1, problem.rows, 1, 1, 1)


def staging(problem: Problem) -> tuple[Any, KernelRecord]:
    """The kernel that runs before the product, as a record."""
    pointer = _records.operand(problem.dtype, (), False)
    words = dict.fromkeys(("rows_ready", "shard_ready"), "*i64")
    return _records.record(
        stage, "ag_moe.stage", problem.num_ranks, {"x": pointer, "gathered": pointer, **words},
        tuples={"shape": gemm.Shape, "shards": Shards}, constants={"block": BLOCK},
        options={"num_warps": STAGE_WARPS, "num_stages": 1},
        aligned=_records.aligned_sizes("shape", tokens_of(problem)),
    )  # fmt: skip


def _call_of(world: World, problem: Problem, config: Config) -> Call:
    key = ("ag_moe", problem, config)
    found = world.calls.get(key)
    if found is None:
        kernel = KERNEL if config.transport == "push" else PUT_KERNEL
        found = world.calls[key] = Call(world, problem, config, kernel)
    return found


def problem_of(world: World, x: Any, b: Any, routing: Routing, out: Any = None) -> Problem:
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    problem = _moe.problem_of(Problem, world, x, b, routing)
    own = x.shape[0]
    first, end = problem.shard(world.rank)
    if own != end - first:
        raise ShapeError(
            f"ag_moe: rank {world.rank} of {world.num_ranks} passes x with {own} tokens, but of "
            f"the m={problem.m} that were routed it holds {end - first} (torch.chunk)"
        )
    if out is not None:
        _lanes.check_out("ag_moe", out, (problem.num_slots, problem.n), x.dtype, world)
    return problem


# ---------------------------------------------------------------------------------------------
# The card


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's tensors, the same for one seed on every machine."""
    first, end = problem.shard(rank)
    return _moe.make_inputs(problem, end - first, rank, seed)


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    routing = _moe.routing_of(problem, inputs)
    return ag_moe(inputs["x"], inputs["b"], routing, world=world, config=config)


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernels that a call with this configuration launches, as records."""
    config = config or choose(problem, target)
    config.check(problem, target)
    if config.transport == "put":
        yield staging(problem)
        yield _moe.record(PUT_KERNEL, problem, config)
    else:
        yield _moe.record(KERNEL, problem, config)


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """The result's shape and dtype, without its values."""
    shape = (problem.num_slots, problem.n)
    return torch.empty(shape, dtype=problem.torch_dtype, device="meta")


op = Op(
    name="ag_moe",
    summary="out[slot, n] = all_gather(x)[token of slot, k] @ b[expert of slot]",
    problem=Problem,
    config=Config,
    make_problem=partial(_moe.make_problem, Problem),
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=kernels,
    smallest_config={"lanes": 1},
    trials=(
        *trials({"m": 20, "n": 24, "k": 16, "experts": 4, "top_k": 2}),
        # More than a block for each lane.
        Trial((2,), {"m": 36, "n": 16, "k": 600, "experts": 2, "top_k": 1}, "push"),
        # Inputs change as soon as a call is over.
        Trial((2,), {"m": 20, "n": 24, "k": 16, "experts": 4, "top_k": 2}, "put", on_heap=True),
    ),
    baselines=_baselines.AG_MOE,
    fake=fake,
    backward=("moe_rs", "all_gather"),
    **_moe.CARD,
)
