"""Top-k routing for a mixture of experts: where every token goes, as tables on the device.

    ids, weights[token, :]  =  the top_k largest of softmax(logits[token, :]), or of sigmoids
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
        -inf, and a token with no logit above that has weights of NaN (of sigmoids 0 / 0 too)
Source  the design's section 4; docs/decisions/009-hooks.md for the tables; how experts are rated:
        weft.compiler.experts.Scoring
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch

from weft.base import fields
from weft.base.card import UNFUSED, Op, Trial, trials
from weft.base.errors import ConfigError, ShapeError
from weft.base.parts import full_part
from weft.base.target import Target
from weft.compiler import layouts
from weft.compiler.experts import Routing, Scoring, Tables, choose, tables
from weft.plan import by_libraries, described, operations
from weft.plan.call_cache import by_layout, check_shard, find_call
from weft.plan.choices import given_or_chosen
from weft.plan.exchanges import Resident
from weft.plan.kept_launches import KeptLaunches
from weft.plan.launches import Start
from weft.plan.problems import nodes_of, random_rows
from weft.plan.routing import ByTables, tables_like, tokens_together
from weft.plan.vectors import power_of_two
from weft.runtime.world import World
from weft.tiles import choices

MOST_EXPERTS = 1024
SCORES = ("softmax", "sigmoid")
# Calls of a trial: the work itself, and of one row.
SAME_EXPERTS = (0, 0, 2, 0)
OF_V3 = {"m": 20, "n": 8, "top_k": 3, "groups": 4, "top_groups": 2, "biased": True,
         "score": "sigmoid", "scale": 2.5}  # fmt: skip
OF_V2 = {"m": 20, "n": 12, "top_k": 3, "groups": 3, "top_groups": 2, "group_best": 1,
         "renormalise": False}  # fmt: skip
# What a thread has of the logits that a program looks at together.
THREADS, THREAD_LOGITS = 256, 16
# The same where tokens are few: fewer of them, and fewer threads, took longer on an H100.
FEWEST_TOKENS, FEWEST_THREADS, FEW_LOGITS = 4, 128, 8


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[Tables]:
    """All ranks at once."""
    logits = torch.cat([one["logits"] for one in inputs])
    chosen, share = choose(logits, problem.top_k, problem.scoring, inputs[0].get("bias"))
    return [tables(problem, rank, chosen, share) for rank in range(problem.num_ranks)]


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(ByTables):
    """m tokens over all ranks, each with n logits: one for each expert, of which it takes top_k.

    What `score` .. `scale` say: Scoring; `biased`: there is a bias for each expert. Tiles are of
    up to `tile_m` slots. `split_experts`: a rank's tables are of its own experts.
    """

    top_k: int = 2
    renormalise: bool = True
    tile_m: int = 128
    score: str = "softmax"
    biased: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    scale: float = 1.0
    split_experts: bool = False

    op = "moe_route"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.n <= MOST_EXPERTS:
            raise ShapeError(f"{self.op}: {self.n} experts; it takes 1 to {MOST_EXPERTS}")
        self.check_sizes(self.num_slots)
        self._check_groups()
        if self.score not in SCORES:
            known = ", ".join(map(repr, SCORES))
            raise ConfigError(f"{self.op}: score={self.score!r}; it must be one of {known}")

    def _check_groups(self) -> None:
        groups, taken, best = self.groups, self.top_groups, self.group_best
        size = self.n // max(groups, 1)
        if groups < 1 or self.n % groups:
            wrong = f"groups must divide {self.n} experts"
        elif not 1 <= taken <= groups or best < 1:
            wrong = f"1 to {groups} groups can be taken, by their best 1 or more"
        elif self.top_k > taken * size:
            wrong = f"top_k={self.top_k} of {taken} groups of {size} experts"
        else:
            return
        said = f"{self.op}: groups={groups}, top_groups={taken}, group_best={best}"
        raise ShapeError(f"{said}: {wrong}")

    @property
    def scoring(self) -> Scoring:
        return Scoring(
            self.score, self.renormalise, self.groups, self.top_groups,
            min(self.group_best, self.n // self.groups), self.scale,
        )  # fmt: skip

    @property
    def experts(self) -> int:
        return self.n

    @property
    def own_experts(self) -> int:
        return full_part(self.n, self.num_ranks) if self.split_experts else self.n

    def first_expert(self, rank: int) -> int:
        return rank * self.own_experts if self.split_experts else 0


@dataclass(frozen=True)
class Config(Resident):
    """Units  block: tokens that a program looks at together; channels: programs, and blocks of each
    rank's tokens, at most. transport: sm_push, or unfused"""

    block: int = 32
    channels: int = 16
    num_warps: int = 4
    transport: str = "sm_push"

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        fields.check_one_of(problem.op, self, "transport", ("sm_push", UNFUSED))
        self.check_channels(problem.op, target)
        fields.check_powers_of_two(problem.op, self, "block", least=1)

    def blocks(self, problem: Problem) -> choices.Blocks:
        return choices.Blocks.of(
            problem, problem.n, self.block, self.channels, scoring=problem.scoring,
            apart=problem.own_experts if problem.split_experts else 0,
        )  # fmt: skip


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    experts = power_of_two(problem.n)
    block = max(1, THREADS * THREAD_LOGITS // experts)
    block = min(block, tokens_together(problem.top_k), max(1, power_of_two(problem.rows)))
    if target.backend == "emu":
        one = Config(block=min(block, 32), channels=2)
        yield replace(one, channels=one.resident_channels(target))
        return
    channels = min(64, target.num_sms - 1)
    # Few tokens are spread over all programs.
    block = min(block, max(FEWEST_TOKENS, power_of_two(ceil(problem.rows / channels))))
    threads = min(THREADS, max(FEWEST_THREADS, block * experts // FEW_LOGITS))
    yield Config(block=block, channels=channels, num_warps=threads // target.warp_size)


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
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    scale: float = 1.0,
    split_experts: bool = False,
    config: Config | None = None,
) -> Routing:
    """The top_k experts of every token, and the tables by which products of them run. Collective.

        scores = softmax(logits), or with score="sigmoid" each one's sigmoid
        ids = topk(scores + bias, top_k)
        weights = scale * scores[ids]            over their sum: renormalise
        token_of = the tokens of all ranks, sorted by expert; stable

    With groups > 1 experts are chosen from top_groups of as many groups of neighbours alone: those
    with the largest sums of their group_best best. DeepSeek-V3's routing is score="sigmoid", bias,
    groups=8, top_groups=4, scale=2.5.

    With split_experts a rank's tables are of its own experts alone, which are split over ranks as
    torch.chunk splits them: slots are numbered from the first of these on, a choice of another
    rank's expert has the slot -1, and behind the last slot token_of is -1.

    Shapes  logits: [own tokens, experts], contiguous; m, all ranks' tokens, defaults to num_ranks *
            own: pass it where ranks differ; bias: [experts], alike on all ranks. Results: Routing
    Dtypes  logits float16, bfloat16 or float32; bias and weights fp32, tables int32. The bias
            chooses alone and has no gradient
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if operations.is_asked(logits):
        made = operations.as_operation(
            "moe_route", world, (logits, top_k), m=m, renormalise=renormalise, tile_m=tile_m,
            score=score, bias=bias, groups=groups, top_groups=top_groups, group_best=group_best,
            scale=scale, split_experts=split_experts, config=config,
        )  # fmt: skip
        return Routing(Tables(*made), tile_m, split_experts)
    rest = (
        top_k, m, renormalise, tile_m, score, groups, top_groups, group_best, scale, split_experts,
        config,
    )  # fmt: skip
    call = find_call(world, "moe_route", (logits, bias), rest, _Call, by_layout)
    return Routing(call(logits, bias), tile_m, split_experts)


class _Call:
    """What calls with tensors like these share on one rank."""

    tensors = ""

    def __init__(
        self, world: World, logits: Any, bias: Any, top_k: int, m: int | None, renormalise: bool,
        tile_m: int, score: str, groups: int, top_groups: int, group_best: int, scale: float,
        split_experts: bool, config: Config | None,
    ) -> None:  # fmt: skip
        problem = problem_of(
            world, logits, top_k, m, renormalise, tile_m, score, bias, groups, top_groups,
            group_best, scale, split_experts,
        )  # fmt: skip
        config = given_or_chosen(world, problem, config)
        self.world, self.problem, self.config = world, problem, config
        self.name = (
            f"moe_route m={problem.m},n={problem.n} {problem.dtype} top_k={top_k} "
            f"tile_m={tile_m} {problem.scoring} biased={problem.biased} "
            f"split_experts={split_experts} {config}"
        )
        self._own, self._likes = len(logits), tables_like(problem, len(logits), world.device)
        self._kept = None
        if problem.m and config.transport != UNFUSED:
            slots = world.asked("moe_route", *config.blocks(problem).memory)
            self._kept = KeptLaunches(world, slots)

    def __call__(self, logits: Any, bias: Any) -> Tables:
        """Queue the call; its tables. Collective."""
        world, problem = self.world, self.problem
        world.operator_call(self.name, self.tensors)
        if self._kept is None:
            if problem.m:
                return by_libraries.route(world, problem, logits, bias)
            return Tables.empty(problem, self._own, world.device)
        made = Tables(*map(torch.empty_like, self._likes))
        given = [logits, *made] if bias is None else [logits, bias, *made]
        self._kept.run(given, partial(self._starts, (logits, bias), made))
        return made

    def _starts(self, rated: tuple[Any, Any], made: Tables, slot: Any) -> Iterator[Start]:
        world, config = self.world, self.config
        blocks = config.blocks(self.problem)
        yield Start(
            choices.moe_route_tables, (min(config.channels, blocks.count), 1, 1),
            (*rated, made, choices.Heard.of(slot), slot.arg, blocks.tokens, blocks.cut, world.arg,
             self.problem.split_experts),
            config.options(world.target),
        )  # fmt: skip


def problem_of(
    world: World,
    logits: Any,
    top_k: int,
    m: int | None,
    renormalise: bool,
    tile_m: int,
    score: str = "softmax",
    bias: Any = None,
    *of_groups: Any,
) -> Problem:
    """The problem that this rank's logits are a part of.

    Raises  ShapeError, DtypeError, ConfigError: tensors that do not fit together, or the world
    """
    layouts.check_tensor("moe_route", "logits", logits, world)
    if logits.dim() != 2:
        shape = tuple(logits.shape)
        raise ShapeError(f"moe_route: logits has shape {shape}; it must be [tokens, experts]")
    own, n = logits.shape
    problem = Problem(
        own * world.num_ranks if m is None else m, n, world.num_ranks, str(logits.dtype),
        nodes_of(world), top_k, renormalise, tile_m, score, bias is not None, *of_groups,
    )  # fmt: skip
    check_shard("moe_route", "logits", own, problem, world)
    if bias is not None:
        layouts.check_tensor("moe_route", "bias", bias, world)
        if tuple(bias.shape) != (n,) or bias.dtype != torch.float32:
            said = f"moe_route: bias is {bias.dtype} of shape {tuple(bias.shape)}"
            raise ShapeError(f"{said}; it must be torch.float32 of ({n},), one for each expert")
    return problem


# ---------------------------------------------------------------------------------------------
# The card


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random logits on the CPU: the same for one seed on every machine."""
    made = {"logits": random_rows(problem, rank, problem.own_tokens(rank), seed)}
    if problem.biased:
        generator = torch.Generator().manual_seed(seed)
        made["bias"] = torch.rand(problem.n, generator=generator) - 0.5
    return made


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> Tables:
    return moe_route(
        inputs["logits"], problem.top_k, world=world, m=problem.m, config=config,
        tile_m=problem.tile_m, bias=inputs.get("bias"), split_experts=problem.split_experts,
        **problem.scoring._asdict(),
    ).tables  # fmt: skip


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> Tables:
    """A rank's results: their shapes and dtypes, without their values."""
    return Tables.empty(problem, problem.own_tokens(rank), "meta")


op = Op(
    name="moe_route",
    summary="experts and weights of m tokens, and all tokens sorted by expert",
    problem=Problem,
    config=Config,
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    unfused=(Config(transport=UNFUSED, channels=2),),
    kernels=described.KernelsOf(run, make_inputs, candidates),
    default_shape={"m": 256, "n": 32, "top_k": 4, "split_experts": 0},
    smallest={"m": 2, "n": 4, "top_k": 2},
    smallest_config={"block": 1},
    trials=(
        *trials({"m": 20, "n": 8, "top_k": 2}),
        # Several blocks to a rank.
        Trial((2,), {"m": 140, "n": 6, "top_k": 2}),
        # As DeepSeek-V3 routes, and V2: groups divide the experts of all calls.
        Trial((2,), OF_V3, calls=SAME_EXPERTS),
        Trial((2,), OF_V2, calls=SAME_EXPERTS),
        Trial((2,), {"m": 20, "n": 7, "top_k": 2, "split_experts": True}),
    ),
    awkward_shapes=(
        (4, {"m": 97, "n": 24, "top_k": 8}),
        (3, {"m": 29, "n": 7, "top_k": 7}),
        (2, {"m": 1, "n": 1, "top_k": 1}),
        (1, {"m": 40, "n": 128, "top_k": 8}),
        (8, {"m": 9, "n": 5, "top_k": 3}),
        (4, {"m": 0, "n": 16, "top_k": 2}),
        (3, {"m": 29, "n": 7, "top_k": 3, "split_experts": True}),
    ),
    fake=fake,
    backward=("reduce_scatter",),
    takes_nodes=True,
)
