"""All-gather of tokens, then the product with each one's experts, as one operator.

    out[slot, :]  =  x of all ranks[token_of[slot], :] @ b[expert of slot]

m tokens are split as torch.chunk splits them. Every rank has n columns of every expert and ends
with its columns of all m * top_k slots, in the order of moe_route: sorted by expert. Which slots an
expert has is known on the device alone.

Plan, `put` (many tokens, on GPUs of one node)
    stage     a kernel first: every rank's slot is free; own tokens -> the own slot, own words
    puts      copy engines: own tokens -> rank - 1's slot, - 2's, ..; behind each a word
    multiply  as below, without feeders

Plan, `push`: one kernel on each rank, the GEMM template with hooks (weft.tiles.grouped)
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
from torch.autograd.graph import increment_version

from weft.base.card import Op, Trial, trials
from weft.base.errors import ConfigError, ShapeError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.ir import core
from weft.ops import _ag_moe_call, _autograd, _baselines, _custom_ops, _lanes, _moe
from weft.ops.moe_route import Routing
from weft.runtime.world import World

# From so many bytes of own tokens on, engines bring them: a few microseconds' worth of links.
PUT_BYTES = 1 << 20


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


# What is woven into the GEMM template, from which the kernels are generated
# (docs/generated_kernels.md).
KERNEL = core.require(
    core.parse("""\
program(ag_moe_multiply)
x = param(pointer, by='own tokens')
b = param(operand)
out = param(pointer)
gathered = param(pointer)
rows_ready = param(signals, by='ag_moe_multiply on all ranks')
routing = param(tables, by='moe_route')
slot = param(slot)
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
gathered = param(pointer, by='the engines of all ranks')
rows_ready = param(signals, by='the engines of all ranks')
routing = param(tables, by='moe_route')
slot = param(slot)
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
    if _autograd.is_asked(x, b):
        tensors = (x, b, routing.tables.weight_of, list(routing.tables))
        rest = (routing.tile_m,)
        return _custom_ops.as_operation("ag_moe", world, tensors, *rest, config=config, out=out)
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


def _call_of(world: World, problem: Problem, config: Config) -> _ag_moe_call.Call:
    key = ("ag_moe", problem, config)
    found = world.calls.get(key)
    if found is None:
        kernel = KERNEL if config.transport == "push" else PUT_KERNEL
        found = world.calls[key] = _ag_moe_call.Call(world, problem, config, kernel)
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
        yield _ag_moe_call.staging(problem)
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
