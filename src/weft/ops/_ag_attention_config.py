"""What a call of ag_attention is asked for, and how it is done: configurations, which to take, and
what kernels are told.

Not an operator: a part of ag_attention.py, which see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, ClassVar, NamedTuple

from weft.base.errors import ConfigError, ShapeError
from weft.base.target import Target
from weft.ops import _lanes
from weft.tiles import attention

ENGINE = "put"
TRANSPORTS = (ENGINE, "push")
# An SM that the persistent grid leaves free, so that `take` finds a place beside it.
SPARE_SMS = 1
# The longest head.
MOST_D = 256


@dataclass(frozen=True)
class Problem(_lanes.Rows):
    """m tokens over all ranks, n = kv_heads * d elements in each one's keys and in its values.

    `sequences`: how many cu_seqlens tells of; 0: one of all tokens, and no cu_seqlens.
    """

    q_heads: int = 1
    kv_heads: int = 1
    d: int = 1
    causal: bool = True
    sequences: int = 0

    op: ClassVar[str] = "ag_attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.d <= MOST_D:
            raise ShapeError(f"{self.op}: heads of d={self.d}; they have 1 to {MOST_D} elements")
        if self.kv_heads < 1 or self.q_heads < 1 or self.q_heads % self.kv_heads:
            raise ShapeError(
                f"{self.op}: q has {self.q_heads} heads, k and v have {self.kv_heads}; each head "
                "of k serves as many of q, one at least"
            )
        if self.sequences < 0:
            raise ShapeError(f"{self.op}: sequences={self.sequences} is negative")

    @property
    def group(self) -> int:
        """Heads of q that share one of k."""
        return self.q_heads // self.kv_heads

    @property
    def k(self) -> int:
        """Products that are added up for an element of the result, at most."""
        return self.d + self.m

    @property
    def flops(self) -> int:
        """Of all ranks' mean, for one sequence; the last causal rank has nearly twice that."""
        pairs = self.m * self.m // (2 if self.causal else 1)
        return 4 * pairs * self.q_heads * self.d // self.num_ranks

    @property
    def memory_bytes(self) -> int:
        """What one rank must read and write at least."""
        return (2 * self.rows * self.q_heads * self.d + 2 * self.m * self.n) * self.itemsize

    def peers(self, rank: int) -> int:
        """How many ranks need this rank's keys: rank + 1, + 2, ..."""
        return self.num_ranks - 1 - (rank if self.causal else 0)


@dataclass(frozen=True)
class Config:
    """How a call is done; every field is the same on all ranks.

    Units   tile_m: rows of a tile, of (token, head) pairs; pack: heads that share one; tile_n:
            keys at a time; tile_k: the part of a head that is multiplied at a time; chunks: signals
            per shard; lanes: programs that store before they attend; block: elements that one
            stores at a time
    """

    transport: str = ENGINE
    tile_m: int = 128
    tile_n: int = 64
    tile_k: int = MOST_D
    pack: int = 1
    num_warps: int = 8
    num_stages: int = 2
    chunks: int = 4
    lanes: int = 16
    block: int = 4096

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        op = problem.op
        if self.transport not in TRANSPORTS:
            raise ConfigError(
                f"{op}: transport={self.transport!r}; it must be one of {', '.join(TRANSPORTS)}"
            )
        if self.transport == ENGINE and len(problem.nodes) > 1:
            raise ConfigError(
                f"{op}: transport={ENGINE!r} on {len(problem.nodes)} nodes; a copy engine reaches "
                "the ranks of its own node only: take transport='push'"
            )
        for name in ("tile_m", "tile_n", "tile_k", "block"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ConfigError(f"{op}: {name}={size}; it must be a power of two from 16 on")
        if self.pack < 1 or problem.group % self.pack or self.pack > self.tile_m:
            raise ConfigError(
                f"{op}: pack={self.pack}; heads of a tile share their keys, so it must divide "
                f"{problem.group}, and be no more than tile_m={self.tile_m}"
            )
        if self.num_warps not in (1, 2, 4, 8, 16) or not 1 <= self.num_stages <= 8:
            raise ConfigError(
                f"{op}: num_warps={self.num_warps}, num_stages={self.num_stages}; warps are 1, 2, "
                "4, 8 or 16, stages 1 to 8"
            )
        if not 1 <= self.chunks <= 1024:
            raise ConfigError(f"{op}: chunks={self.chunks}; it must be between 1 and 1024")
        if not 1 <= self.lanes <= programs_on(target):
            raise ConfigError(
                f"{op}: lanes={self.lanes}; {target} runs 1 to {programs_on(target)} together "
                "beside one of another kernel"
            )
        needed = self.shared_bytes(problem)
        if needed > target.shared_bytes and target.backend != "emu":
            raise ConfigError(
                f"{op}: tile_m={self.tile_m}, tile_n={self.tile_n} with {self.num_stages} stages "
                f"and d={problem.d} needs {needed} bytes of shared memory, {target} has "
                f"{target.shared_bytes}; take fewer stages or a smaller tile"
            )

    def shared_bytes(self, problem: Problem) -> int:
        """Shared memory of one program, about: queries, and stages of keys and of values."""
        rows = self.tile_m + 2 * self.num_stages * self.tile_n
        return rows * attention.padded_head(problem.d) * problem.itemsize

    def tile(self, problem: Problem) -> attention.Tile:
        return attention.Tile.of(
            self.tile_m, self.tile_n, d=problem.d, k=self.tile_k, pack=self.pack
        )

    def tiles(self, problem: Problem) -> int:
        """Those of a full shard."""
        return ceil(problem.rows / (self.tile_m // self.pack)) * (problem.q_heads // self.pack)

    def grid(self, problem: Problem, target: Target) -> int:
        """Programs: all of them are resident."""
        return min(max(self.tiles(problem), self.lanes), programs_on(target))

    def chunk_rows(self, problem: Problem) -> int:
        return max(1, ceil(problem.rows / self.chunks))

    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def programs_on(target: Target) -> int:
    """How many programs may run at once."""
    return max(1, target.num_sms - SPARE_SMS)


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    order = TRANSPORTS
    if len(problem.nodes) > 1 or target.num_sms <= SPARE_SMS or problem.num_ranks == 1:
        order = ("push",)
    for transport in order:
        for cut in _cuts(problem, target):
            yield _with_chunks(replace(cut, transport=transport), problem, target)


def _cuts(problem: Problem, target: Target) -> Iterator[Config]:
    """Tiles that spill no registers there."""
    d = attention.padded_head(problem.d)
    if target.backend == "emu":
        cut = Config(tile_m=16, tile_n=32, num_warps=4, block=1024)
    elif problem.itemsize == 4:
        # Exact products, without tensor cores: a thread holds its rows of what is multiplied.
        cut = Config(tile_m=16, tile_n=16, tile_k=16, num_warps=2, num_stages=1)
    elif target.backend == "hip":
        cut = Config(tile_m=128 if d <= 128 else 64, tile_n=32, num_warps=4, num_stages=1)
    elif target.arch == 90:
        cut = Config(tile_m=128 if d <= 128 else 64, tile_n=64 if d <= 128 else 32)
    elif target.arch == 100 and d == 64:
        cut = Config(tile_m=128, tile_n=64)
    elif target.arch == 100 and d == 256:
        cut = Config(tile_m=64, tile_n=32, num_stages=1)
    else:
        cut = Config(tile_m=64, tile_n=32)
        if target.arch == 80 and d < 64:
            cut = replace(cut, num_warps=4)
        elif target.arch == 80 and d == 256:
            cut = replace(cut, tile_n=16)
    # Where tokens fill no tile, heads do.
    if problem.rows < cut.tile_m and problem.group <= cut.tile_m:
        cut = replace(cut, pack=problem.group)
    yield cut


def _with_chunks(config: Config, problem: Problem, target: Target) -> Config:
    """`config` with signals and lanes for the sizes there are."""
    if target.backend == "emu":
        return replace(config, chunks=min(2, max(1, problem.rows)), lanes=min(2, target.num_sms))
    chunks = min(max(1, problem.rows // 256), 16)
    if config.transport == ENGINE:
        # Each costs an engine's start.
        chunks = min(chunks, 4)
    lanes = min(max(chunks, 16), programs_on(target))
    return replace(config, chunks=chunks, lanes=lanes)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# What kernels are told


class Shards(NamedTuple):
    """m tokens, `rows` to a rank, in `chunks` of chunk_rows; `columns` elements in each one's keys;
    `lanes` programs store them. `sequences`, of which `steps` is how often they can be halved."""

    m: Any
    rows: Any
    chunks: Any
    chunk_rows: Any
    columns: Any
    lanes: Any
    sequences: Any
    steps: Any


def shape_of(problem: Problem, tokens: int, scale: float | None = None) -> attention.Shape:
    return attention.Shape.of(tokens, problem.q_heads, problem.kv_heads, problem.d, scale)


def shards_of(problem: Problem, config: Config) -> Shards:
    return Shards(
        problem.m, max(1, problem.rows), config.chunks, config.chunk_rows(problem), problem.n,
        config.lanes, problem.sequences, (problem.sequences + 1).bit_length(),
    )  # fmt: skip
