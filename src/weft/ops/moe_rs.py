"""Products of tokens with their experts, weighted, then reduce-scatter, as one operator.

    out[own token, :]  =  sum over ranks and over j of  weight * (x[slot, :] @ b[expert of slot])
                          slot = slot_of[own token, j],  j = 0 .. top_k - 1

Every rank has all m * top_k slots of x, in moe_route's order, but a part of k, and that part of
every expert's rows; tokens are split as torch.chunk splits them, and a rank ends with its own: the
down projection of a mixture of experts. Which slots an expert has is known on the device alone.

Plan, `sm_push`: one kernel on each rank, the GEMM template with hooks (weft.tiles.hooks.table)
    order     tiles by the table, in moe_route's turns from the last one: own tokens' come last
    emit      rows times their weights -> `partials` of the rank whose token each is
    announce  tells every rank, whether it has tokens in the tile or not
    then      own tokens: waits for all tiles of all ranks, and adds up in fp32: this rank's share,
              rank + 1's, ..; of each the first choice's, the second's, ..
The order of sums is fixed, so results are the same bits in every run. Shares travel in the result's
dtype.

Signals (SET to the call's epoch e, read on the device; waited for in the call that sets it)
    partials_ready[tile, src, column]   src's share of this rank's tokens in this tile is here, or
                                        there is none. By src
    slot_free, epoch, ticket            the slot's; the last program moves them
Told of every tile, a rank waits for one range of words, of which each thread looks at its own; by
the tables it would be a wait for each tile.

Limits  as ag_moe; what travels is a row for each choice of a token, not one for each token
Source  docs/decisions/009-hooks.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch

from weft.base.card import Op, Trial, trials
from weft.base.target import Target
from weft.ir import core
from weft.ops import _baselines, _moe
from weft.ops._moe import Config
from weft.ops.moe_route import Routing
from weft.plan import described, operations
from weft.runtime.world import World


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32."""
    tables, sums = inputs[0], torch.zeros(problem.m, problem.n)
    for one in inputs:
        weighted = _moe.product(problem, one["x"], one) * tables["weight_of"][:, None]
        for j in range(problem.top_k):
            sums += weighted[tables["slot_of"][:, j].long()]
    return [sums[slice(*problem.shard(rank))] for rank in range(problem.num_ranks)]


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_moe.Problem):
    """m tokens over all ranks, n columns of the result; k of every expert on each rank."""

    op = "moe_rs"
    rows_are = "one for each slot, as ag_moe gives them"

    def rows_of_x(self, rank: int) -> int:
        return self.num_slots

    def rows_of_out(self, rank: int) -> int:
        return self.num_tokens(rank)


candidates = partial(_moe.candidates, Config)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The program


# Hooks of the GEMM template, of which the kernel is composed
# (docs/composed_kernels.md).
KERNEL = core.require(
    core.parse("""\
program(moe_rs_multiply)
x = param(pointer, by='rows by slot')
b = param(operand)
out = param(pointer)
partials = param(pointer)
partials_ready = param(signals, by=kernel, to=kernel, announces=(partials,))
routing = param(tables, by='moe_route')
slot = param(slot, by=kernel, to=kernel)
world = param(world)
experts = mapping(tables, (routing,), cuts=experts)
template(gemm, (128, 128, 64), formula='out = reduce_scatter(scatter_rows(x @ b by expert))')
credit(begin, slot)
hook(order, in_turn_backwards, (routing, experts))
hook(ready, rows_by_slot, (x,))
hook(emit, push_rows, (partials, routing, experts))
notify(announce, partials_ready, all, experts)
wait(collect, partials_ready, all, experts)
hook(collect, sum_rows, (partials, out, experts))
finish(end, slot)
""")
)


# ---------------------------------------------------------------------------------------------
# The host


def moe_rs(
    x: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    *,
    world: World,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's tokens: the weighted sums of all ranks' products with their experts. Collective.

        out[t] = sum over ranks, j of  weight_of[s] * (x[s] @ b[expert of s]),  s = slot_of[t, j]

    Shapes  x: [m * top_k, k] by slot, contiguous; b: [experts, k, n], contiguous or the transpose
            of a contiguous [experts, n, k]; out: [own tokens, n]
    Dtypes  all alike, float16, bfloat16 or float32; sums in fp32, shares rounded once on their way
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if operations.is_asked(x, b, routing.tables.weight_of):
        return _moe.as_operation("moe_rs", world, x, b, routing, config, out)
    problem = problem_of(world, x, b, routing, out)
    config = config or choose(problem, world.target)
    return _moe.run(_call, world, problem, config, x, b, routing, out)


def _call(world: Any, problem: Problem, config: Config) -> _moe.Call:
    rows = problem.num_ranks * problem.rows * problem.top_k
    tiles = problem.routing.max_tiles * ceil(problem.n / config.tile_n)
    return _moe.Call(
        world, problem, config, KERNEL,
        {"partials": ((rows, problem.n), problem.torch_dtype)},
        {"partials_ready": (problem.num_ranks * tiles, torch.int64)},
    )  # fmt: skip


problem_of = partial(_moe.problem_of, Problem)
fake = _moe.fake


# ---------------------------------------------------------------------------------------------
# The card


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    routing = _moe.routing_of(problem, inputs)
    return moe_rs(inputs["x"], inputs["b"], routing, world=world, config=config)


op = Op(
    name="moe_rs",
    summary="out = own tokens of sum(weight * x[slot, k] @ b[expert of slot]) over ranks, choices",
    problem=Problem,
    config=Config,
    make_problem=partial(_moe.make_problem, Problem),
    make_inputs=_moe.make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=described.kernels_of(run, _moe.shaped_inputs, candidates),
    trials=(
        *trials({"m": 20, "n": 24, "k": 16, "experts": 4, "top_k": 2}),
        Trial((2,), {"m": 40, "n": 40, "k": 16, "experts": 2, "top_k": 1}),
    ),
    baselines=_baselines.MOE_RS,
    fake=fake,
    backward=("ag_moe", "all_gather"),
    **_moe.CARD,
)
