"""Products of tokens with their experts, weighted, then reduce-scatter, as one operator.

    out[own token, :]  =  sum over ranks and over j of  weight * (x[slot, :] @ b[expert of slot])
                          slot = slot_of[own token, j],  j = 0 .. top_k - 1

Every rank has all m * top_k slots of x, in moe_route's order, but a part of k, and that part of
every expert's rows; tokens are split as torch.chunk splits them, and a rank ends with its own: the
down projection of a mixture of experts. Which slots an expert has is known on the device alone.

Plan    the compiler's, of `program` below (`weft explain moe_rs`): a kernel multiplies and stores
        rows by slot, rounded; a second one adds up each token's rows, times their weights, in fp32:
        the first choice's, the second's, .. This rank's share of a token goes to the rank whose
        token it is, which adds own shares to rank + 1's, rank + 2's, .. So a row travels for each
        token, not one for each of its choices; relay: a far rank's goes to its partner on this
        node, from where one sum crosses, by a kernel beside the second one
Signals the plan's: a word for each tile of tokens and source
The order of sums is fixed, so results are the same bits in every run. Shares travel in the result's
dtype.

Limits  as ag_moe; columns are one tile of the second kernel, up to 32768
Source  docs/decisions/009-hooks.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from weft.base.card import UNFUSED, Op, Trial, trials
from weft.compiler import ByExpert, Shard, Tensor, Times, frontend
from weft.compiler.schedules import RELAY, SM_PUSH, Config
from weft.ops import _baselines
from weft.ops.moe_route import Routing
from weft.plan import grouped, operations
from weft.plan.call_cache import other_kind
from weft.runtime.world import World


def program(x: Any, b: Any, routing: Any) -> Any:
    products = frontend.grouped_matmul(x, b, routing)
    return frontend.reduce_scatter(frontend.scatter_rows(products, routing))


def total(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """All tokens' sums over all ranks at once, in fp32."""
    sums = torch.zeros(problem.m, problem.n)
    for one in inputs:
        weighted = grouped.product(problem, one["x"], one) * one["weight_of"][:, None]
        for slot in one["slot_of"].long().t():
            sums += torch.where(slot[:, None] >= 0, weighted[slot], 0.0)
    return sums


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Each rank's tokens of these."""
    sums = total(problem, inputs)
    return [sums[slice(*problem.shard(rank))] for rank in range(problem.num_ranks)]


class Problem(grouped.Problem):
    """m tokens over all ranks, n columns of the result; k of every expert on each rank, or all of
    its own experts'."""

    op, rows_are = "moe_rs", "one for each slot, as ag_moe gives them"
    transports, program = (SM_PUSH, RELAY, UNFUSED), staticmethod(program)
    templates, sends_tiles = ("plain", "sm90"), False

    def rows_of_x(self, rank: int) -> int:
        return self.num_slots

    def result_rows(self, rank: int) -> tuple[int, int]:
        return self.shard(rank)

    def types(self) -> dict[str, Tensor]:
        k, by_slot, split = self.k * self.num_ranks, Shard(1), Shard(1)
        if self.split_experts:
            k, by_slot, split = self.k, ByExpert(), Shard(0)
        x = Tensor(self.dtype, (Times("m", self.top_k), k), by_slot)
        b = Tensor(self.dtype, (self.experts, k, self.n), split)
        return {"x": x, "b": b, "routing": self.table}


candidates = partial(grouped.summing, "reduce_scatter")


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
    if not isinstance(routing, Routing):
        raise other_kind("moe_rs", "routing", routing, "what moe_route returned")
    if operations.is_asked(x, b, routing.tables.weight_of):
        return grouped.as_operation("moe_rs", world, x, b, routing, config, out)
    return grouped.run(Problem, world, x, b, routing, config, out)


problem_of = partial(grouped.problem_of, Problem)
fake = grouped.summed.fake

op = Op(
    name="moe_rs",
    summary="out = own tokens of sum(weight * x[slot, k] @ b[expert of slot]) over ranks, choices",
    config=Config,
    reference=reference,
    trials=(
        *trials({"m": 20, "n": 24, "k": 16, "experts": 4, "top_k": 2}),
        Trial((2,), {"m": 40, "n": 40, "k": 16, "experts": 2, "top_k": 1}),
        Trial((2,), {"m": 20, "n": 24, "k": 16, "experts": 4, "top_k": 2, "split_experts": True}),
    ),
    baselines=_baselines.MOE_RS,
    backward=("ag_moe", "all_gather"),
    unfused=(Config(transport=UNFUSED),),
    **grouped.card(Problem, moe_rs, candidates),
)
