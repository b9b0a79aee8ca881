"""Schedules of ag_wgrad: configurations of a problem, which one to take, and what kernels are told
of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import ClassVar

from weft.base import fields
from weft.base.dtypes import FLOATS
from weft.base.errors import ConfigError, DtypeError
from weft.base.target import Target
from weft.compiler import gather_schedules
from weft.compiler.gather_schedules import CE_PUSH, LIBRARY, SM_PUSH, programs_on
from weft.language.mapping import StaticMapping
from weft.plan import gathered
from weft.tiles import blocking, gemm

TRANSPORTS = (CE_PUSH, SM_PUSH, LIBRARY)
# Turns over all tiles: each but the last costs a tile's way through memory, in fp32.
MOST_TURNS = 8
# Rows of tiles that programs of one time share.
GROUP_M = 8


@dataclass(frozen=True)
class Problem(gathered.Problem):
    """m rows over all ranks; k columns of what is gathered, n of the other, on each rank.

    The result is [k, n], with x gathered; or [n, k] where `b_is_nk`, with y gathered: as weights
    lie whose gradient it is. Sums are in fp32.
    """

    op: ClassVar[str] = "ag_wgrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in FLOATS:
            raise DtypeError(f"{self.op}: dtype {self.dtype}; it takes {', '.join(FLOATS)}")

    @property
    def gathers_y(self) -> bool:
        return self.b_is_nk

    @property
    def result(self) -> tuple[int, int]:
        return (self.n, self.k) if self.gathers_y else (self.k, self.n)

    @property
    def memory_bytes(self) -> int:
        """What one rank must read and write at least."""
        return self.m * (self.n + self.k) * self.itemsize + self.n * self.k * self.out_itemsize


@dataclass(frozen=True)
class Config(gather_schedules.Config):
    """As ag_gemm's; tile_k are rows that are multiplied at a time.

    Units   split: turns over all tiles, each with its share of the rows
    """

    transport: str = SM_PUSH
    split: int = 1

    op: ClassVar[str] = "ag_wgrad"

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        fields.check_one_of(self.op, self, "transport", TRANSPORTS)
        if self.template != "plain":
            raise ConfigError(
                f"{self.op}: template={self.template!r}; rows are summed by 'plain' alone"
            )
        fields.check_ranges(self.op, self, split=(1, MOST_TURNS))
        super().check(problem, target)

    def num_tiles(self, problem: Problem) -> int:
        return self.blocking.num_tiles(*problem.result)

    def grid(self, problem: Problem, target: Target) -> int:
        """Programs of _multiply: all of them are resident."""
        return min(self.num_tiles(problem) * self.split + self.num_pushers, programs_on(target))


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    order = (SM_PUSH,)
    if len(problem.nodes) <= 1 and target.num_sms > gather_schedules.SPARE_SMS:
        is_small = problem.shard_bytes <= gather_schedules.PUSH_BYTES or problem.num_ranks == 1
        order = (SM_PUSH, CE_PUSH) if is_small else (CE_PUSH, SM_PUSH)
    p, q = problem.result
    rows = problem.m if target.backend == "emu" else p
    for transport in order:
        for cut in blocking.candidates(p, q, rows, problem.dtype, target):
            config = Config(transport=transport, **asdict(cut))
            config = gather_schedules.with_transport(config, problem, target)
            yield replace(config, group_m=GROUP_M, split=_split(config, problem, target))
    if gather_schedules.can_use_library(problem, target):
        yield Config(transport=LIBRARY)


def _split(config: Config, problem: Problem, target: Target) -> int:
    """As many turns as programs would have no tile without."""
    room = programs_on(target) - config.num_pushers
    turns = room // max(1, config.num_tiles(problem))
    return max(1, min(turns, problem.num_ranks * config.chunks, MOST_TURNS))


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# What kernels are told


def is_even(problem: Problem, config: Config) -> bool:
    """Do all segments divide by tile_k?"""
    return problem.m == problem.rows * problem.num_ranks and problem.rows % config.tile_k == 0


def split_of(problem: Problem, config: Config) -> StaticMapping:
    """As ag_gemm's, in chunks of whole tile_k."""
    split = StaticMapping.of(
        problem.m, problem.num_ranks, chunks=config.chunks, push_rows=1, tile_rows=config.tile_m
    )
    return split._replace(chunk_rows=ceil(split.chunk_rows / config.tile_k) * config.tile_k)


def shape_of(problem: Problem) -> gemm.Shape:
    """Of the product: rows of the operands are summed over."""
    p, q = problem.result
    return gemm.Shape(p, q, problem.m, p, q, q)


def can_use_tma(problem: Problem, config: Config, target: Target) -> bool:
    """Do all rows begin where TMA can read them, and end where it does?"""
    rows = [extent * problem.itemsize for extent in problem.result]
    rows.append(problem.result[1] * problem.out_itemsize)
    return config.tma and is_even(problem, config) and blocking.can_use_tma(target, rows)


def tile_of(problem: Problem, config: Config, tma: bool) -> gemm.Tile:
    extents = (config.tile_m, config.tile_n, config.tile_k)
    return gemm.Tile(*extents, False, tma, is_even(problem, config))
