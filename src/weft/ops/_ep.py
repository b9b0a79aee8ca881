"""What ep_dispatch and ep_combine share: problem, configuration, handle, checks, cards.

Not an operator. Which rows go where is in weft.tiles.experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

import torch

from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.parts import full_part
from weft.base.target import Target
from weft.compiler import layouts
from weft.compiler.experts import Tables, tables
from weft.ops.moe_route import check_sizes, tokens_together
from weft.plan import exchanges
from weft.plan.exchanges import Transport
from weft.plan.problems import Rows
from weft.plan.vectors import PACKET_BYTES, power_of_two
from weft.tiles import experts, route

MOST_COLUMNS = 1024
# What a thread has of the rows that are moved together.
THREADS, THREAD_BYTES, PACKETS_OF_THREAD = 256, 64, 4
# Channels where each has a tile of tokens at most, and where it has more: then two share an SM, and
# one sends while the other stores. Read with these, no others tried.
FEW_CHANNELS, MOST_CHANNELS = 128, 256
# Up to so many bytes of a rank's rows they travel as packets, as all_gather's do; unmeasured.
FEW_BYTES = 1 << 19


@dataclass(frozen=True)
class Problem(Rows):
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
        op = self.op
        if self.experts < 1 or self.own_experts + self.num_ranks > MOST_COLUMNS:
            most = MOST_COLUMNS - self.num_ranks
            raise ShapeError(
                f"{op}: {self.experts} experts on {self.num_ranks} ranks; a rank has 1 to {most}"
            )
        if self.capacity < 0:
            object.__setattr__(self, "capacity", self.most_slots)
        most = max(2 * self.m * power_of_two(self.top_k), self.capacity)
        check_sizes(self, self.experts, most)

    @property
    def own_experts(self) -> int:
        """How many a rank has; the last ones may have fewer, or none."""
        return full_part(self.experts, self.num_ranks)

    def first_expert(self, rank: int) -> int:
        return rank * self.own_experts

    @property
    def element_bytes(self) -> int:
        """Of what rows are moved as."""
        return self.itemsize

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

    @property
    def max_tiles(self) -> int:
        return route.most_tiles(self.capacity, self.own_experts, self.tile_m)


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

    def can(self, problem: Any, target: Target) -> bool:
        return super().can(problem, target) and not (
            self.by_packets and problem.packed_bytes % PACKET_BYTES
        )

    def check(self, problem: Any, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        if self.by_library:
            raise ConfigError(f"{problem.op}: transport='nccl'; it must be sm_push or ll")
        super().check(problem, target)
        if self.by_packets and problem.packed_bytes % PACKET_BYTES:
            raise ConfigError(
                f"{problem.op}: transport='ll' with rows of {problem.row_bytes} bytes; what "
                f"packets carry must divide by {PACKET_BYTES}: take push"
            )
        for name in ("tokens", "batch"):
            if (value := getattr(self, name)) < 1 or value & (value - 1):
                raise ConfigError(f"{problem.op}: {name}={value}; it must be a power of two")

    def grid(self, problem: Problem) -> int:
        """Channels that have tokens: as many on every rank."""
        return max(1, min(self.channels, ceil(problem.rows / self.tokens)))

    def packets(self, problem: Problem, row_bytes: int) -> int:
        """Words for a row of each token. A tile's last addresses, though masked, are on the heap
        too."""
        row = row_bytes // PACKET_BYTES
        return (problem.num_tokens + self.tokens) * row + self.block

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
    size = min(PACKET_BYTES, problem.element_bytes) if by_packets else problem.element_bytes
    length = max(1, problem.row_bytes // size)
    # A power of two that divides the row, if that is not too small.
    block = max(128, min(1024, length & -length))
    of_thread = PACKETS_OF_THREAD * PACKET_BYTES if by_packets else THREAD_BYTES
    tokens = max(1, THREADS * of_thread // (block * size))
    # Of few tokens each has a channel, which moves longer parts of it, if it has any.
    while tokens > 1 and ceil(problem.rows / tokens) < FEW_CHANNELS:
        tokens, block = tokens // 2, max(block, min(2 * block, power_of_two(length)))
    has_few = ceil(problem.rows / tokens) <= FEW_CHANNELS
    one = Config(
        transport, channels=FEW_CHANNELS if has_few else MOST_CHANNELS,
        block=block, tokens=tokens, batch=min(32, tokens_together(problem.top_k)),
        num_warps=THREADS // target.warp_size,
    )  # fmt: skip
    return replace(one, channels=min(one.channels, one.most_channels(target)))


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


def split_of(problem: Problem, tokens: int) -> experts.Split:
    sizes = (problem.own_experts, problem.rows, tokens, problem.top_k, problem.capacity)
    return experts.Split(problem.experts, *sizes)


# ---------------------------------------------------------------------------------------------
# What a dispatch gives


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


class Dispatched(NamedTuple):
    """x: [capacity, n] rows by slot; (rows, scales) of such. Behind the last slot nothing is
    written."""

    x: Any
    handle: Handle


def reference_tables(problem: Problem, everyone: Sequence[Mapping[str, Any]]) -> list[Tables]:
    """All ranks' tables, without capacity; `everyone` has ids and weights of each rank's tokens."""
    choices = torch.full((problem.num_tokens, problem.top_k), -1)
    shares = torch.zeros(problem.num_tokens, problem.top_k)
    for rank, one in enumerate(everyone):
        mine = slice(rank * problem.rows, rank * problem.rows + len(one["ids"]))
        choices[mine], shares[mine] = one["ids"].long(), one["weights"]
    return [
        tables(problem, rank, choices, shares)._replace(ids=one["ids"], weights=one["weights"])
        for rank, one in enumerate(everyone)
    ]


# ---------------------------------------------------------------------------------------------
# Calls


def check_choices(world: Any, op: str, x: Any, ids: Any, weights: Any) -> None:
    """Raises  ShapeError, DtypeError: tensors that do not fit together, or the world"""
    for name, tensor, dtype in (("ids", ids, torch.int32), ("weights", weights, torch.float32)):
        layouts.check_tensor(op, name, tensor, world)
        if tensor.dtype != dtype:
            raise DtypeError(f"{op}: {name} are {tensor.dtype}; pass {name}.to({dtype})")
        if tensor.dim() != 2 or tensor.shape[0] != x.shape[0]:
            raise ShapeError(
                f"{op}: {name} has shape {tuple(tensor.shape)} but x has {x.shape[0]} tokens; it "
                f"must be [{x.shape[0]}, top_k]"
            )
    if ids.shape != weights.shape:
        raise ShapeError(
            f"{op}: ids has shape {tuple(ids.shape)} but weights {tuple(weights.shape)}; each "
            "choice has one weight"
        )


def check_rows(world: Any, op: str, name: str, rows: Any) -> None:
    """Raises  ShapeError: not rows on the world's device"""
    layouts.check_tensor(op, name, rows, world)
    if rows.dim() != 2:
        raise ShapeError(f"{op}: {name} has shape {tuple(rows.shape)}; it must have 2 dimensions")


def begin(world: Any, problem: Problem, config: Config | None, kind: str) -> Config:
    """How the call is done, which all ranks do alike: the configuration, checked."""
    config = config or choose(problem, world.target)
    config.check(problem, world.target)
    world.operator_call(
        f"{problem.op} m={problem.m},n={problem.n} {problem.dtype} experts={problem.experts} "
        f"top_k={problem.top_k} capacity={problem.capacity} tile_m={problem.tile_m} {kind} {config}"
    )
    return config


# ---------------------------------------------------------------------------------------------
# The card


CARD: Mapping[str, Any] = {
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


def make_problem(
    kind: Any, num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Any:
    """capacity: 0 is room for all."""
    rest = (shape["experts"], shape["top_k"], shape.get("tile_m", 16), shape.get("capacity") or -1)
    return kind(shape["m"], shape["n"], num_ranks, dtype, nodes, *rest)


def make_choices(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Experts and weights of one rank's tokens, the same for one seed on every machine."""
    first, end = problem.shard(rank)
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank + 1)
    share = torch.rand(end - first, problem.experts, generator=generator)
    weights, ids = share.topk(problem.top_k)
    return {"ids": ids.int(), "weights": weights / weights.sum(1, keepdim=True)}
