"""Products of tokens with their experts, weighted, then all-reduce, as one operator.

    out[token, :]  =  sum over ranks and over j of  weight * (x[slot, :] @ b[expert of slot])
                      slot = slot_of[token, j],  j = 0 .. top_k - 1

As moe_rs, and every rank ends with all tokens: the down projection of a mixture of experts where
tokens are too few to split, as in a decode step.

Plan    the compiler's, of `program` below (`weft explain moe_ar`): a kernel multiplies and stores
        rows by slot, rounded; a second one adds up each token's rows, times their weights, in fp32,
        and sums them over ranks. one_shot_ll and two_shot_ll, for few tokens: LL packets, to all
        ranks or to the token's owner and back; sm_push: stores to the owner, and back to all;
        relay: as moe_rs, then weft's all_gather
Signals the plan's: of sm_push a word for each tile of tokens and source, and one for each tile of
        another owner; packets carry their flags
The order of sums is fixed and alike on all ranks, so results are the same bits on each, in every
run. Shares travel in the result's dtype.

Limits  as moe_rs; packets up to 1024 tokens, on one node
Source  docs/decisions/009-hooks.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from weft.base.card import UNFUSED, Op, Trial, trials
from weft.compiler import frontend
from weft.compiler.schedules import RELAY, SM_PUSH, Config
from weft.ir.task import LL
from weft.ops import _baselines
from weft.ops.moe_route import Routing
from weft.ops.moe_rs import Problem as Scattered
from weft.ops.moe_rs import total
from weft.plan import grouped, operations
from weft.plan.call_cache import other_kind
from weft.runtime.world import World


def program(x: Any, b: Any, routing: Any) -> Any:
    products = frontend.grouped_matmul(x, b, routing)
    return frontend.all_reduce(frontend.scatter_rows(products, routing))


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32."""
    return [total(problem, inputs)] * problem.num_ranks


class Problem(Scattered):
    """m tokens, which every rank has all of; n columns of the result; k of every expert on each
    rank."""

    op = "moe_ar"
    transports, program = (SM_PUSH, RELAY, *LL, UNFUSED), staticmethod(program)

    def result_rows(self, rank: int) -> tuple[int, int]:
        return 0, self.m


candidates = partial(grouped.summing, "all_reduce")


def moe_ar(
    x: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    *,
    world: World,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """All tokens: the weighted sums of all ranks' products with their experts. Collective.

        out[t] = sum over ranks, j of  weight_of[s] * (x[s] @ b[expert of s]),  s = slot_of[t, j]

    Shapes  x: [m * top_k, k] by slot, contiguous; b: [experts, k, n], contiguous or the transpose
            of a contiguous [experts, n, k]; out: [m, n]
    Dtypes  all alike, float16, bfloat16 or float32; sums in fp32, shares rounded once on their way
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if not isinstance(routing, Routing):
        raise other_kind("moe_ar", "routing", routing, "what moe_route returned")
    if operations.is_asked(x, b, routing.tables.weight_of):
        return grouped.as_operation("moe_ar", world, x, b, routing, config, out)
    return grouped.run(Problem, world, x, b, routing, config, out)


problem_of = partial(grouped.problem_of, Problem)
fake = grouped.summed.fake
SHAPE = {"m": 20, "n": 24, "k": 16, "experts": 4, "top_k": 2}

op = Op(
    name="moe_ar",
    summary="out = sum(weight * x[slot, k] @ b[expert of slot]) over ranks, choices, on every rank",
    config=Config,
    reference=reference,
    trials=(
        *trials(SHAPE),
        *(Trial((3,), SHAPE, one) for one in (SM_PUSH, *LL)),
        Trial((2,), {"m": 40, "n": 40, "k": 16, "experts": 2, "top_k": 1}, SM_PUSH),
        Trial((2,), {**SHAPE, "split_experts": True}),
    ),
    baselines=_baselines.MOE_AR,
    backward=(),
    unfused=(Config(transport=UNFUSED),),
    composed=(RELAY,),
    **grouped.card(Problem, moe_ar, candidates),
)
