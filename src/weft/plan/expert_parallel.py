"""Experts that are split over ranks: ep_dispatch's and ep_combine's problem, configuration, handle,
memory and cards. Which rows go where is in weft.tiles.experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch

from weft.base import fields
from weft.base.errors import ConfigError, ShapeError
from weft.base.parts import full_part
from weft.base.target import Target
from weft.compiler.experts import Tables
from weft.plan import described, exchanges
from weft.plan.exchanges import Transport
from weft.plan.routing import ByTables, tokens_together
from weft.plan.vectors import PACKET_BYTES, power_of_two
from weft.tiles import experts

MOST_COLUMNS = 1024
# What a thread has of the rows that are moved together.
THREADS, THREAD_BYTES, PACKETS_OF_THREAD = 256, 64, 4
# Channels where each has a tile of tokens at most, and where it has more: then two share an SM, and
# one sends while the other stores. Read with these, no others tried.
FEW_CHANNELS, MOST_CHANNELS = 128, 256
# Up to so many bytes of a rank's rows they travel as packets, as all_gather's do; unmeasured.
FEW_BYTES = 1 << 19


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

    transports = {"sm_push": Transport(reaches_far=True), "ll": Transport()}

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

    def first_expert(self, rank: int) -> int:
        return rank * self.own_experts

    @property
    def packed_bytes(self) -> int:
        """What all that travels in packets divides by."""
        return self.row_bytes

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
class Config(exchanges.Config):
    """How rows are moved; every field is the same on all ranks.

    Units   channels: programs; tokens: that one moves at a time; block: elements of each, packets
            of 4 bytes where those are dispatched; batch: tokens whose choices a program looks at
            together
    """

    transport: str = "sm_push"
    block: int = 1024
    tokens: int = 4
    batch: int = 32

    by_library = False

    def can(self, problem: Any, target: Target) -> bool:
        is_packed = not problem.packed_bytes % PACKET_BYTES
        return super().can(problem, target) and (is_packed or not self.by_packets)

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        super().check(problem, target)
        fields.check_powers_of_two(problem.op, self, "tokens", "batch", least=1)
        if not self.can(problem, target):
            raise ConfigError(
                f"{problem.op}: transport='ll' with rows of {problem.row_bytes} bytes; what "
                f"packets carry must divide by {PACKET_BYTES}: take sm_push"
            )

    def grid(self, problem: Problem) -> int:
        """Channels that have tokens: as many on every rank."""
        return max(1, min(self.channels, ceil(problem.rows / self.tokens)))

    def extents(self, problem: Problem, vec: int) -> experts.Extents:
        width = max(2, power_of_two(problem.top_k))
        return experts.Extents(self.tokens, width, self.block, vec)


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    few = problem.shard_bytes <= FEW_BYTES
    for transport in ("ll", "sm_push") if few else ("sm_push", "ll"):
        one = _config(problem, target, transport)
        if one.can(problem, target):
            yield one


def _config(problem: Problem, target: Target, transport: str) -> Config:
    if target.backend == "emu":
        return Config(transport, channels=2, block=1024, tokens=2, batch=4, num_warps=4)
    by_packets = transport == "ll"
    size = min(PACKET_BYTES, problem.word_bytes) if by_packets else problem.word_bytes
    length = max(1, problem.row_bytes // size)
    # A power of two that divides the row, if that is not too small.
    block = max(128, min(1024, length & -length))
    of_thread = PACKETS_OF_THREAD * PACKET_BYTES if by_packets else THREAD_BYTES
    tokens = max(1, THREADS * of_thread // (block * size))
    # Of few tokens each has a channel, which moves longer parts of it, if it has any.
    while tokens > 1 and ceil(problem.rows / tokens) < FEW_CHANNELS:
        tokens, block = tokens // 2, max(block, min(2 * block, power_of_two(length)))
    channels = FEW_CHANNELS if ceil(problem.rows / tokens) <= FEW_CHANNELS else MOST_CHANNELS
    one = Config(
        transport, channels=channels, block=block, tokens=tokens,
        batch=min(32, tokens_together(problem.top_k)), num_warps=THREADS // target.warp_size,
    )  # fmt: skip
    return replace(one, channels=min(one.channels, one.most_channels(target)))


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


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


def begin(world: Any, problem: Problem, config: Config | None, kind: str) -> Config:
    """How the call is done, which all ranks do alike: the configuration, checked."""
    config = config or choose(problem, world.target)
    config.check(problem, world.target)
    world.operator_call(
        f"{problem.op} m={problem.m},n={problem.n} {problem.dtype} experts={problem.experts} "
        f"top_k={problem.top_k} capacity={problem.capacity} tile_m={problem.tile_m} {kind} {config}"
    )
    return config


def memory_of(
    problem: Problem, config: Config, ready: str, **row_bytes: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a slot: words `ready` for each source and channel, and for each array a row of every
    token, of so many bytes, or its packets."""
    arrays: dict[str, Any] = {}
    signals: dict[str, Any] = {ready: (problem.num_ranks * config.grid(problem), torch.int64)}
    for name, size in row_bytes.items():
        if config.by_packets:
            # A tile's last addresses, though masked, are on the heap too.
            words = (problem.num_tokens + config.tokens) * (size // PACKET_BYTES) + config.block
            signals[name] = (words, torch.int64)
        else:
            arrays[name] = ((max(8, problem.num_tokens * size),), torch.uint8)
    return arrays, signals


# ---------------------------------------------------------------------------------------------
# The card


def make_problem(
    kind: Any, num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = (),
    **more: Any,
) -> Any:  # fmt: skip
    """capacity: 0 is room for all."""
    rest = (shape["experts"], shape["top_k"], shape.get("tile_m", 16), shape.get("capacity") or -1)
    return kind(shape["m"], shape["n"], num_ranks, dtype, nodes, *rest, **more)


def card(
    kind: type[Problem], run: Callable[..., Any], drawn: Callable[..., Any],
    shaped: Callable[..., Any],
) -> dict[str, Any]:  # fmt: skip
    """What the cards have alike. Inputs are `drawn`; by those as they are `shaped` kernels are
    found."""
    return {
        "problem": kind,
        "config": Config,
        "make_problem": partial(make_problem, kind),
        "make_inputs": drawn,
        "run": run,
        "candidates": candidates,
        "kernels": described.kernels_of(run, shaped, candidates),
        "default_shape": {"m": 64, "n": 64, "experts": 8, "top_k": 2, "capacity": 0},
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
