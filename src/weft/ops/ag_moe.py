"""All-gather of tokens, then the product with each one's experts, as one operator.

    out[slot, :]  =  x of all ranks[token_of[slot], :] @ b[expert of slot]

m tokens are split as torch.chunk splits them. Every rank has n columns of every expert and ends
with its columns of all m * top_k slots, in the order of moe_route: sorted by expert. Which slots an
expert has is known on the device alone.

Plan    the compiler's, of `program` below (`weft explain ag_moe`): tiles of own tokens come first,
        then those whose last tokens arrive next; a tile waits for the ranks whose tokens are in it,
        and for no other.
        sm_push: the product's first `pushers` CTAs store own tokens in every rank's slot, the own
        one first, then rank + 1's, + 2's, ..; then they multiply too
        ce_push (many tokens, on GPUs of one node): a kernel waits until every rank's slot is free
        and copies own tokens to the own one; copy engines move them on beneath the product
        relay (several nodes): a kernel beside the product brings own tokens to near ranks and to
        one partner on each other node, which passes them on, chunk by chunk
Signals the plan's: a word for each source and pusher, for each source whose rows engines carry, or
        for each source and chunk
Limits  x is contiguous, b is [experts, k, n] or a transposed [experts, n, k]; the template for
        Hopper takes tables of tile_m=128 and k in multiples of 64
Source  docs/decisions/009-hooks.md; Triton-distributed's AG-MoE for the idea
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from weft.base import fields
from weft.base.card import UNFUSED, Op, Trial, trials
from weft.base.target import Target
from weft.compiler import Shard, Tensor, frontend, schedules
from weft.compiler.cost.choose import relayed_chunks
from weft.compiler.schedules import CE_PUSH, RELAY, SM_PUSH
from weft.ops import _baselines
from weft.ops.moe_route import Routing
from weft.plan import grouped, operations
from weft.plan.call_cache import other_kind
from weft.runtime.world import World

# From so many bytes of own tokens on, engines bring them: a few microseconds' worth of links.
CE_PUSH_BYTES = 1 << 20


def program(x: Any, b: Any, routing: Any) -> Any:
    rows = frontend.gather_rows(frontend.all_gather(x), routing)
    return frontend.grouped_matmul(rows, b, routing)


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32."""
    tokens = torch.cat([one["x"] for one in inputs]).float()
    return [grouped.product(problem, tokens[one["token_of"].long()], one) for one in inputs]


class Problem(grouped.Problem):
    """m tokens of k elements over all ranks; n columns of every expert on each rank, or of its own
    experts."""

    op, rows_are = "ag_moe", "own tokens, as torch.chunk splits all"
    transports, templates = (SM_PUSH, CE_PUSH, RELAY, UNFUSED), ("plain", "sm90")
    program, gives_slots, is_summed = staticmethod(program), True, False

    def rows_of_x(self, rank: int) -> int:
        return self.own_tokens(rank)

    def result_rows(self, rank: int) -> tuple[int, int]:
        return 0, self.num_slots

    def types(self) -> dict[str, Tensor]:
        b, split = (self.experts, self.k, self.n * self.num_ranks), Shard(2)
        if self.split_experts:
            b, split = (self.experts, self.k, self.n), Shard(0)
        x = Tensor(self.dtype, ("m", self.k), Shard(0))
        return {"x": x, "b": Tensor(self.dtype, b, split), "routing": self.table}


@dataclass(frozen=True)
class Config(schedules.Config):
    """How a call is done, as `Schedule` says; tile_m is the tables'."""

    pushers: int = 8

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        super().check(problem, target)
        fields.check_ranges("ag_moe", self, pushers=(1, target.num_sms))

    def unfit(self, problem: Problem, target: Target) -> Iterator[str]:
        yield from super().unfit(problem, target)
        if self.template == "sm90" and self.transport == SM_PUSH and len(problem.nodes) > 1:
            yield (
                f"template='sm90' with transport={self.transport!r} on {len(problem.nodes)} nodes; "
                f"tokens do not reach other nodes from Gluon: take template='plain', or {RELAY!r}"
            )


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    return islice(_candidates(problem, target), grouped.MOST_CANDIDATES)


def _candidates(problem: Problem, target: Target) -> Iterator[Config]:
    is_much = problem.rows * problem.k * problem.itemsize >= CE_PUSH_BYTES
    for config in grouped.candidates(Config, problem, target):
        pushers = 2 if target.backend == "emu" else config.pushers
        ways = [replace(config, pushers=min(pushers, target.num_sms))]
        if len(problem.nodes) <= 1 and problem.num_ranks > 1:
            ways.append(replace(ways[0], transport=CE_PUSH))
        if schedules.can_relay(problem):
            sizes = problem.rows, problem.rows * problem.k * problem.itemsize, len(problem.nodes)
            relayed = replace(ways[0], transport=RELAY, chunks=relayed_chunks(*sizes, target))
            ways = [relayed, *ways] if config.template == "plain" else [relayed]
            yield from ways
            continue
        yield from ways[::-1] if is_much and config.template == "sm90" else ways


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
    if not isinstance(routing, Routing):
        raise other_kind("ag_moe", "routing", routing, "what moe_route returned")
    if operations.is_asked(x, b):
        return grouped.as_operation("ag_moe", world, x, b, routing, config, out)
    if out is None and routing.split_experts and b.dim() == 3:
        # What comes next may read all slots.
        out = x.new_zeros(routing.tables.token_of.shape[0], b.shape[2])
    return grouped.run(Problem, world, x, b, routing, config, out)


problem_of = partial(grouped.problem_of, Problem)
fake = grouped.summed.fake

SHAPE = {"m": 20, "n": 24, "k": 16, "experts": 4, "top_k": 2}
# Rows of which, relayed, each chunk has some.
RELAYED = {**SHAPE, "m": 21}

op = Op(
    name="ag_moe",
    summary="out[slot, n] = all_gather(x)[token of slot, k] @ b[expert of slot]",
    config=Config,
    reference=reference,
    smallest_config={"pushers": 1},
    trials=(
        *trials(SHAPE),
        # More than a block for each communication CTA.
        Trial((2,), {"m": 64, "n": 16, "k": 600, "experts": 2, "top_k": 1}, SM_PUSH),
        Trial((2,), {**SHAPE, "split_experts": True}),
        # As ag_gemm's: words of chunks without rows may come late.
        Trial((2, 1), RELAYED, RELAY, calls=(2, 0) * 3, configs={2: {"chunks": 1}}),
        # Inputs change as soon as a call is over.
        Trial((2,), SHAPE, CE_PUSH, on_heap=True),
        Trial((2, 1), RELAYED, RELAY, on_heap=True, calls=(0, 0, 0, 1, 0, 1, 0)),
    ),
    baselines=_baselines.AG_MOE,
    backward=("moe_rs", "all_gather"),
    unfused=(Config(transport=UNFUSED),),
    **grouped.card(Problem, ag_moe, candidates),
)
