"""All-gather of tokens, then the product with each one's experts, as one operator.

    out[slot, :]  =  x of all ranks[token_of[slot], :] @ b[expert of slot]

m tokens are split as torch.chunk splits them. Every rank has n columns of every expert and ends
with its columns of all m * top_k slots, in the order of moe_route: sorted by expert. Which slots an
expert has is known on the device alone.

Plan, `push`: one kernel on each rank, the GEMM template with hooks (weft.tiles.grouped)
    feeders   the first `lanes` programs: store own tokens in every rank's slot, the own one first,
              then rank + 1's, + 2's, ..; then they multiply too, what is left of each round
    order     tiles by the table, in the turns of moe_route: those of own tokens first, then those
              whose last tokens come next
    ready     waits for the ranks whose tokens are in the tile, and for no other
    emit      slots -> out

Signals (SET to the call's epoch e, read on the device; waited for in the call that sets it)
    rows_ready[src * lanes + l]   what lane l of rank src stores of its tokens is in this rank's
                                  slot. By src
    slot_free, epoch, ticket      the slot's; the last program moves them
Ranks without tokens signal too, so that any range of ranks may be waited for.

Limits  x is contiguous, b is [experts, k, n] or a transposed [experts, n, k]; rows by index are
        loaded by pointers: no TMA, and no template for Hopper yet
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
from weft.compiler.lower import source
from weft.ir import core
from weft.ops import _autograd, _baselines, _custom_ops, _lanes, _moe
from weft.ops.moe_route import Routing


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
    """Units   lanes: programs that store own tokens before they multiply"""

    lanes: int = 8

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        super().check(problem, target)
        if not 1 <= self.lanes <= target.num_sms:
            raise ConfigError(
                f"ag_moe: lanes={self.lanes}; {target} runs 1 to {target.num_sms} programs together"
            )

    def grid(self, problem: Problem, target: Target) -> int:
        """Programs: all of them are resident."""
        return min(self.lanes + super().grid(problem, target), target.num_sms)


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    for config in _moe.candidates(Config, problem, target):
        yield replace(config, lanes=2) if target.backend == "emu" else config


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The program


# What is woven into the GEMM template, from which the kernel is generated
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


# ---------------------------------------------------------------------------------------------
# The host


def ag_moe(
    x: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    *,
    world: Any,
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
    buffers = {"gathered": ((problem.m, problem.k), x.dtype)}
    signals = {"rows_ready": (problem.num_ranks * config.lanes, torch.int64)}
    slot = world.workspace("ag_moe", buffers, signals)
    source.load(KERNEL).plain[(config.grid(problem, world.target),)](
        x, b, out, slot.gathered, slot.rows_ready, _moe.tables_of(routing), slot.arg,
        _moe.shape_of(problem), config.experts(problem, config.lanes),
        config.tile(problem).as_constexpr(), world.arg, **config.options(),
    )  # fmt: skip
    return out


def problem_of(world: Any, x: Any, b: Any, routing: Routing, out: Any = None) -> Problem:
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
    world: Any, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    routing = _moe.routing_of(problem, inputs)
    return ag_moe(inputs["x"], inputs["b"], routing, world=world, config=config)


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or choose(problem, target)
    config.check(problem, target)
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
        Trial((2,), {"m": 36, "n": 16, "k": 600, "experts": 2, "top_k": 1}),
    ),
    baselines=_baselines.AG_MOE,
    fake=fake,
    backward=("moe_rs", "all_gather"),
    **_moe.CARD,
)
