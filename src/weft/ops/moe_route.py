"""Top-k routing for a mixture of experts: where every token goes, as tables on the device.

    ids, weights[token, :]  =  the top_k largest of softmax(logits[token, :])
    slot(token, k)          =  its place when all (token, k) of all ranks are sorted by expert

m tokens are split as torch.chunk splits them; every rank passes the logits of its own, and ends
with the tables of all. The sort is stable: an expert's slots are in the order of tokens, so of
source ranks. Of equal logits the lower expert wins. The host never learns how many tokens an expert
has: how many tiles there are is a word on the device.

Plan: one kernel on each rank (weft.tiles.route)
    choose   a block of own tokens, some at a time -> experts and weights, to all ranks; how many
             tokens of the block each expert has, to all ranks; then a word that says so
    count    when the words of all blocks are there: the counts -> what each source has for each
             expert, and where the first of a block's tokens goes
    place    a block of all tokens, some at a time -> its slots: how many before a token in the
             block have its expert
    cut      by the last program: each expert's slots -> tiles of tile_m, with the ranks whose
             tokens it needs; and the turns in which this rank multiplies them
No slot is given out by arrival, so all ranks have the same tables, and the same in every run.

Signals (SET to the call's epoch e; each is waited for in the call that sets it)
    routed[src * blocks + b]    block b of rank src is here, with its counts. By src
    slot_free, epoch, ticket    the slot's; the last program moves them
Blocks without tokens are signalled too.

Limits  logits are contiguous; up to MOST_EXPERTS experts, top_k up to 64; NaN counts as
        -inf, and a token with no logit above that has weights of NaN
Source  the design's section 4; docs/decisions/009-hooks.md for the tables
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.base import fields
from weft.base.card import Op, Trial, trials
from weft.base.errors import ConfigError, ShapeError
from weft.base.target import Target
from weft.compiler import layouts
from weft.compiler.experts import Routing, Tables, tables
from weft.plan import described, operations
from weft.plan.call_cache import check_shard
from weft.plan.launches import Start
from weft.plan.problems import nodes_of, random_rows
from weft.plan.routing import ByTables, tokens_together
from weft.plan.vectors import power_of_two
from weft.runtime.world import World
from weft.tiles import choices

MOST_EXPERTS = 1024
# What a thread has of the logits that a program looks at together.
THREADS, THREAD_LOGITS = 256, 16


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[Tables]:
    """All ranks at once."""
    value = torch.cat([one["logits"] for one in inputs]).float().nan_to_num(-torch.inf, torch.inf)
    chosen = value.sort(dim=1, descending=True, stable=True).indices[:, : problem.top_k]
    share = value.softmax(1).gather(1, chosen)
    if problem.renormalise:
        share = share / share.sum(1, keepdim=True)
    return [tables(problem, rank, chosen, share) for rank in range(problem.num_ranks)]


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(ByTables):
    """m tokens over all ranks, each with n logits: one for each expert, of which it takes top_k.

    Weights are the softmax over all experts or, with `renormalise`, over those taken. Tiles are of
    up to `tile_m` slots.
    """

    top_k: int = 2
    renormalise: bool = True
    tile_m: int = 128

    op = "moe_route"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.n <= MOST_EXPERTS:
            raise ShapeError(f"{self.op}: {self.n} experts; it takes 1 to {MOST_EXPERTS}")
        self.check_sizes(self.num_slots)

    @property
    def experts(self) -> int:
        return self.n


@dataclass(frozen=True)
class Config:
    """Units  block: tokens that a program looks at together; channels: programs, and blocks of each
    rank's tokens, at most"""

    transport: str = "sm_push"
    block: int = 32
    channels: int = 16
    num_warps: int = 4

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        fields.check_one_of("moe_route", self, "transport", ("sm_push",))
        fields.check_powers_of_two("moe_route", self, "block", "num_warps", least=1)
        if not 1 <= self.channels < target.num_sms:
            raise ConfigError(
                f"moe_route: channels={self.channels}; programs that wait for peers must all be "
                f"resident, beside one of another kernel: {target} takes 1 to {target.num_sms - 1}"
            )

    def blocks(self, problem: Problem) -> choices.Blocks:
        return choices.Blocks.of(
            problem, problem.n, self.block, self.channels, renormalise=problem.renormalise
        )  # fmt: skip


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    block = max(1, THREADS * THREAD_LOGITS // power_of_two(problem.n))
    block = min(block, tokens_together(problem.top_k), max(1, power_of_two(problem.rows)))
    if target.backend == "emu":
        yield Config(block=min(block, 32), channels=2)
        return
    num_warps = THREADS // target.warp_size
    yield Config(block=block, channels=min(64, target.num_sms - 1), num_warps=num_warps)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The host


def moe_route(
    logits: torch.Tensor,
    top_k: int,
    *,
    world: World,
    m: int | None = None,
    renormalise: bool = True,
    tile_m: int = 128,
    config: Config | None = None,
) -> Routing:
    """The top_k experts of every token, and the tables by which products of them run. Collective.

        ids, weights = topk(softmax(logits), top_k)          weights over their sum: renormalise
        token_of = the tokens of all ranks, sorted by expert; stable

    Shapes  logits: [own tokens, experts], contiguous; m, all ranks' tokens, defaults to num_ranks *
            own: pass it where ranks differ. Results: Routing
    Dtypes  logits float16, bfloat16 or float32; weights fp32, tables int32
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if operations.is_asked(logits):
        rest = {"m": m, "renormalise": renormalise, "tile_m": tile_m, "config": config}
        made = operations.as_operation("moe_route", world, (logits, top_k), **rest)
        return Routing(Tables(*made), tile_m)
    problem = problem_of(world, logits, top_k, m, renormalise, tile_m)
    config = config or choose(problem, world.target)
    config.check(problem, world.target)
    world.operator_call(
        f"moe_route m={problem.m},n={problem.n} {problem.dtype} top_k={top_k} "
        f"renormalise={renormalise} tile_m={tile_m} {config}"
    )
    made = Tables.empty(problem, logits.shape[0], logits.device)
    if problem.m:
        slot = world.workspace("moe_route", *config.blocks(problem).memory)
        _start(world, problem, config, slot, logits, made).run()
    return Routing(made, tile_m)


def _start(
    world: Any, problem: Problem, config: Config, slot: Any, logits: Any, made: Tables
) -> Start:
    blocks = config.blocks(problem)
    return Start(
        choices.moe_route_tables, (min(config.channels, blocks.count), 1, 1),
        (logits, made, choices.Heard.of(slot), slot.arg, blocks.tokens, blocks.cut, world.arg),
        {"num_warps": config.num_warps},
    )  # fmt: skip


def problem_of(
    world: World, logits: Any, top_k: int, m: int | None, renormalise: bool, tile_m: int
) -> Problem:
    """The problem that this rank's logits are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    layouts.check_tensor("moe_route", "logits", logits, world)
    if logits.dim() != 2:
        shape = tuple(logits.shape)
        raise ShapeError(f"moe_route: logits has shape {shape}; it must be [tokens, experts]")
    own, n = logits.shape
    problem = Problem(
        own * world.num_ranks if m is None else m, n, world.num_ranks, str(logits.dtype),
        nodes_of(world), top_k, renormalise, tile_m,
    )  # fmt: skip
    check_shard("moe_route", "logits", own, problem, world)
    return problem


# ---------------------------------------------------------------------------------------------
# The card


def make_problem(
    num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Problem:
    return Problem(
        shape["m"], shape["n"], num_ranks, dtype, nodes, shape["top_k"],
        tile_m=shape.get("tile_m", 16),
    )  # fmt: skip


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random logits on the CPU: the same for one seed on every machine."""
    return {"logits": random_rows(problem, rank, problem.own_tokens(rank), seed)}


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> Tables:
    return moe_route(
        inputs["logits"], problem.top_k, world=world, m=problem.m, config=config,
        renormalise=problem.renormalise, tile_m=problem.tile_m,
    ).tables  # fmt: skip


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> Tables:
    """A rank's results: their shapes and dtypes, without their values."""
    return Tables.empty(problem, problem.own_tokens(rank), "meta")


op = Op(
    name="moe_route",
    summary="experts and weights of m tokens, and all tokens sorted by expert",
    problem=Problem,
    config=Config,
    make_problem=make_problem,
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=described.kernels_of(run, make_inputs, candidates),
    default_shape={"m": 256, "n": 32, "top_k": 4},
    smallest={"m": 2, "n": 4, "top_k": 2},
    smallest_config={"block": 1},
    trials=(
        *trials({"m": 20, "n": 8, "top_k": 2}),
        # Several blocks to a rank.
        Trial((2,), {"m": 140, "n": 6, "top_k": 2}),
    ),
    awkward_shapes=(
        (4, {"m": 97, "n": 24, "top_k": 8}),
        (3, {"m": 29, "n": 7, "top_k": 7}),
        (2, {"m": 1, "n": 1, "top_k": 1}),
        (1, {"m": 40, "n": 128, "top_k": 8}),
        (8, {"m": 9, "n": 5, "top_k": 3}),
        (4, {"m": 0, "n": 16, "top_k": 2}),
    ),
    fake=fake,
    backward=("reduce_scatter",),
    takes_nodes=True,
)
