"""Experts that are split over ranks: ep_dispatch's and ep_combine's problem, configuration, handle,
memory and cards. Which rows go where is in weft.tiles.experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import torch

from weft.base import fields
from weft.base.card import UNFUSED
from weft.base.errors import ShapeError
from weft.base.hardware import hardware_of
from weft.base.parts import full_part
from weft.base.target import Target
from weft.compiler.cost.expert_rows import Crossing, crossing
from weft.compiler.experts import Routing, Tables
from weft.plan import described, exchanges
from weft.plan.problems import nodes_of
from weft.plan.routing import ByTables, tokens_together
from weft.plan.vectors import power_of_two
from weft.tiles import experts

SM_PUSH, RELAY = "sm_push", "relay"
MOST_COLUMNS = 1024
# What a thread has of the rows that are moved together.
THREADS, THREAD_BYTES = 256, 64
# Channels where each has a tile of tokens at most, and where it has more: then two share an SM, and
# one sends while the other stores. Read with these, no others tried.
FEW_CHANNELS, MOST_CHANNELS = 128, 256


@dataclass(frozen=True)
class Problem(ByTables, exchanges.Problem):
    """Tokens of n elements, up to `rows` = ceil(m / num_ranks) on a rank, each with top_k of
    `experts`, which are split as torch.chunk splits them.

    A rank has `capacity` slots, by default as many as can come; tiles are of up to `tile_m`.
    """

    experts: int = 1
    top_k: int = 1
    tile_m: int = 128
    capacity: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts < 1 or self.own_experts + self.num_ranks > MOST_COLUMNS:
            most = MOST_COLUMNS - self.num_ranks
            raise ShapeError(
                f"{self.op}: {self.experts} experts on {self.num_ranks} ranks; a rank has 1 to "
                f"{most}"
            )
        if self.capacity < 0:
            object.__setattr__(self, "capacity", self.most_slots)
        self.check_sizes(max(2 * self.m * power_of_two(self.top_k), self.capacity))

    @property
    def own_experts(self) -> int:
        """How many a rank has; the last ones may have fewer, or none."""
        return full_part(self.experts, self.num_ranks)

    @property
    def can_relay(self) -> bool:
        """Can ranks of another node have a row by one of them?"""
        return len(self.nodes) > 1

    @property
    def transports(self) -> tuple[str, ...]:  # type: ignore[override]
        return (SM_PUSH, RELAY) if self.can_relay else (SM_PUSH,)

    def first_expert(self, rank: int) -> int:
        return rank * self.own_experts

    @property
    def num_tokens(self) -> int:
        """Places of tokens: `rows` for each rank."""
        return self.num_ranks * self.rows

    @property
    def most_slots(self) -> int:
        """If every token of all ranks went to as many experts of one rank as it can."""
        return self.num_tokens * min(self.top_k, self.own_experts)

    def split(self, tokens: int) -> experts.Split:
        """What kernels get of a rank with so many tokens."""
        sizes = (self.own_experts, self.rows, tokens, self.top_k, self.capacity)
        return experts.Split(self.experts, *sizes)


@dataclass(frozen=True)
class Config(exchanges.Resident):
    """How rows are moved; every field is the same on all ranks.

    Units   channels: programs; tokens: that one moves at a time; block: elements of each; batch:
            tokens whose choices a program looks at together. transport: sm_push; relay, over
            several nodes; or unfused
    """

    channels: int = 16
    block: int = 1024
    num_warps: int = 8
    tokens: int = 4
    batch: int = 32
    transport: str = SM_PUSH

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        fields.check_one_of(problem.op, self, "transport", (*problem.transports, UNFUSED))
        self.check_channels(problem.op, target)
        fields.check_powers_of_two(problem.op, self, "block")
        fields.check_powers_of_two(problem.op, self, "tokens", "batch", least=1)

    def grid(self, problem: Problem) -> int:
        """Channels that have tokens: as many on every rank."""
        return max(1, min(self.channels, ceil(problem.rows / self.tokens)))

    def num_nodes(self, problem: Problem) -> int:
        """Those between which a kernel relays rows; 1: it does not."""
        return len(problem.nodes) if self.transport == RELAY else 1

    def extents(self, problem: Problem, vec: int) -> experts.Extents:
        width = max(2, power_of_two(problem.top_k))
        return experts.Extents(self.tokens, width, self.block, vec)


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first: by each transport."""
    one = _cut(problem, target)
    ways = [replace(one, transport=transport) for transport in problem.transports]
    if len(ways) > 1:
        machine = hardware_of(target)
        ways.sort(key=lambda way: crossed(problem, way).us(machine))
    yield from ways


def crossed(problem: Problem, config: Config) -> Crossing:
    """What crosses between nodes if tokens choose all experts alike often."""
    return crossing(
        problem.nodes, problem.rows, problem.row_bytes, problem.experts, problem.own_experts,
        problem.top_k, config.transport == RELAY,
    )  # fmt: skip


def predict(problem: Problem, target: Target, config: Config) -> float | None:
    """How long rows move, in us, where tokens choose all experts alike often; None on one node,
    and where no machine was measured."""
    machine = hardware_of(target)
    if machine is None or config.transport not in problem.transports or len(problem.nodes) == 1:
        return None
    return crossed(problem, config).us(machine)


def _cut(problem: Problem, target: Target) -> Config:
    """How rows are cut and dealt to programs, by any transport."""
    if target.backend == "emu":
        one = Config(channels=2, block=1024, tokens=2, batch=4, num_warps=4)
        return replace(one, channels=one.resident_channels(target))
    size = problem.word_bytes
    length = max(1, problem.row_bytes // size)
    # A power of two that divides the row, if that is not too small.
    block = max(128, min(1024, length & -length))
    tokens = max(1, THREADS * THREAD_BYTES // (block * size))
    # Of few tokens each has a channel, which moves longer parts of it, if it has any.
    while tokens > 1 and ceil(problem.rows / tokens) < FEW_CHANNELS:
        tokens, block = tokens // 2, max(block, min(2 * block, power_of_two(length)))
    channels = FEW_CHANNELS if ceil(problem.rows / tokens) <= FEW_CHANNELS else MOST_CHANNELS
    batch, num_warps = min(32, tokens_together(problem.top_k)), THREADS // target.warp_size
    one = Config(channels, block, num_warps, tokens, batch)
    return replace(one, channels=one.resident_channels(target))


class Handle(NamedTuple):
    """Which token went where: for products, for the way back, for another dispatch.

    `tables` are moe_route's, but of this rank: slots are numbers among those of its own experts,
    sorted by (own expert, source rank, token). ids, weights: of own tokens, what was wrong being
    -1. token_of: int32[capacity] source * rows + its number there, -1 behind the last; weight_of:
    fp32[capacity]; slot_of: int32[num_ranks * rows, top_k] the own slot of a token's choice, else
    -1; counts: int32[num_ranks, own experts]; tiles: experts are own ones, from 0 on.
    """

    tables: Tables
    problem: Problem

    @property
    def tile_m(self) -> int:
        """Slots of a tile of the tables, at most."""
        return self.problem.tile_m


def handle_of(routing: Routing, kind: type[Problem], world: Any) -> Handle:
    """The handle of a dispatch by a router's tables of own experts.

    Raises  ShapeError: its tables are of all experts
    """
    made, ranks = routing.tables, world.num_ranks
    if not routing.split_experts:
        raise ShapeError(
            f"{kind.op}: the routing has tables of all experts; it takes those of a rank's own: "
            "call moe_route with split_experts=True"
        )
    m, top_k = made.slot_of.shape
    rows, capacity = full_part(m, ranks), made.token_of.shape[0]
    if missing := rows * ranks - m:  # each rank has as many places of tokens
        slot_of = torch.nn.functional.pad(made.slot_of, (0, 0, 0, missing), value=-1)
        made = made._replace(slot_of=slot_of)
    experts = made.counts.shape[1] * ranks
    sizes = (rows * ranks, 1, ranks, "bfloat16", nodes_of(world), experts, top_k)
    return Handle(made, _checked(kind, *sizes, routing.tile_m, capacity))


@lru_cache(maxsize=256)
def _checked(kind: type[Problem], *sizes: Any) -> Problem:
    """Each layer's call asks anew."""
    return kind(*sizes)


def name_of(problem: Problem, config: Config, kind: str) -> str:
    """What all ranks must call alike."""
    return (
        f"{problem.op} m={problem.m},n={problem.n} {problem.dtype} experts={problem.experts} "
        f"top_k={problem.top_k} capacity={problem.capacity} tile_m={problem.tile_m} {kind} {config}"
    )


def memory_of(
    problem: Problem, config: Config, ready: str, **array_bytes: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a slot: arrays of so many bytes; words `ready` for each source and channel."""
    arrays = {name: ((max(8, size),), torch.uint8) for name, size in array_bytes.items()}
    return arrays, {ready: (problem.num_ranks * config.grid(problem), torch.int64)}


# ---------------------------------------------------------------------------------------------
# The card


def card(
    kind: type[Problem], run: Callable[..., Any], drawn: Callable[..., Any],
    shaped: Callable[..., Any],
) -> dict[str, Any]:  # fmt: skip
    """What the cards have alike. Inputs are `drawn`; by those as they are `shaped` kernels are
    found."""
    return {
        "problem": kind,
        "config": Config,
        "make_inputs": drawn,
        "run": run,
        "candidates": candidates,
        "predict": predict,
        "unfused": (Config(transport=UNFUSED, channels=2),),
        "kernels": described.KernelsOf(run, shaped, candidates),
        "default_shape": {"m": 64, "n": 64, "experts": 8, "top_k": 2, "capacity": -1},
        "smallest": {"m": 2, "n": 16, "experts": 2, "top_k": 1},
        "smallest_config": {"channels": 1, "block": 16, "tokens": 1},
        "awkward_shapes": (
            (4, {"m": 97, "n": 40, "experts": 24, "top_k": 8}),
            (3, {"m": 29, "n": 7, "experts": 7, "top_k": 7}),
            (2, {"m": 1, "n": 16, "experts": 1, "top_k": 1}),
            (1, {"m": 40, "n": 48, "experts": 4, "top_k": 4}),
            (8, {"m": 9, "n": 5, "experts": 5, "top_k": 3}),
            (4, {"m": 0, "n": 16, "experts": 4, "top_k": 2}),
        ),
        "takes_nodes": True,
    }
