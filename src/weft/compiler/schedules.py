"""Schedules of a product that is summed over ranks: which there are, and the plan of each.

A `problem` says m, n and k, the dtype, the ranks and their nodes, and which `transports` its
operator has: sm_push (SMs store tiles to peers), ce_push (copy engines do), one_shot_ll and
two_shot_ll (LL packets, for small m), one in which nothing is fused, and the library's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

from weft.base.errors import ConfigError
from weft.base.hardware import hardware_of
from weft.base.target import Target
from weft.compiler import pipeline
from weft.compiler.cost import products
from weft.compiler.facts import Facts, Settings, class_of
from weft.ir.schedule import Schedule
from weft.ir.task import ENGINES, LL, PRODUCTS, Program, are_alike
from weft.tiles import blocking, gemm_sm90, gemm_small
from weft.tiles.blocking import Blocking
from weft.tiles.hooks import scatter

SM_PUSH, CE_PUSH, LIBRARY = "sm_push", "ce_push", "nccl"
TEMPLATES = ("plain", "sm90")
MOST_ENGINES = 4
# Rows of tiles that programs of one turn share, of all ranks' parts.
TOGETHER = 16
# Cuts of the generic template that are worth a measurement.
MOST_CUTS = 2


@dataclass(frozen=True)
class Config(Schedule):
    """How a call is done, as `Schedule` says."""

    def check(self, problem: Any, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        op = problem.op
        if self.transport not in (known := (*problem.transports, LIBRARY)):
            told = f"transport={self.transport!r}; it is one of {', '.join(known)}"
            raise ConfigError(f"{op}: {told}")
        if self.transport == LIBRARY:
            if target.backend != "cuda" or not problem.is_even:
                raise ConfigError(
                    f"{op}: transport={LIBRARY!r} for m={problem.m} on {problem.num_ranks} "
                    f"ranks, on {target}; it takes NVIDIA GPUs, and shards of one size"
                )
            return
        if not self.is_fused:
            return
        if self.transport != SM_PUSH and len(problem.nodes) > 1:
            what = "packets" if self.is_by_packets else "copy engines"
            raise ConfigError(
                f"{op}: transport={self.transport!r} on {len(problem.nodes)} nodes; {what} reach "
                f"the ranks of one node only: take transport={SM_PUSH!r}"
            )
        if self.is_by_packets:
            self.blocking.check(op, problem.dtype, problem.dtype, False, target)
            return
        self._check_engines(problem)
        for name in ("last", "group_m"):
            if not 1 <= (value := getattr(self, name)) <= 1024:
                raise ConfigError(f"{op}: {name}={value}; it must be between 1 and 1024")
        if self.by_tma and self.transport == SM_PUSH and problem.num_ranks > scatter.MOST_PEERS + 1:
            raise ConfigError(
                f"{op}: by_tma with {problem.num_ranks} ranks; a kernel takes descriptors of "
                f"{scatter.MOST_PEERS} peers: take by_tma=False"
            )
        self._check_template(problem, target)

    def _check_engines(self, problem: Any) -> None:
        if not 1 <= self.engines <= MOST_ENGINES:
            raise ConfigError(
                f"{problem.op}: engines={self.engines}; it must be between 1 and {MOST_ENGINES}"
            )
        if self.chunks < 1 or not are_alike(problem.n, self.chunks, self.tile_n):
            raise ConfigError(
                f"{problem.op}: chunks={self.chunks} of n={problem.n} columns in tiles of "
                f"{self.tile_n}; several chunks must be alike, of whole tiles: take 1, or such "
                "that chunks * tile_n divides n"
            )

    def _check_template(self, problem: Any, target: Target) -> None:
        op = problem.op
        if self.template not in TEMPLATES:
            told = f"template={self.template!r}; it must be one of {', '.join(TEMPLATES)}"
            raise ConfigError(f"{op}: {told}")
        if self.template == "plain":
            # C does not leave by TMA, so it takes no shared memory.
            self.blocking.check(op, problem.dtype, problem.dtype, False, target)
            tma = self.tma and problem.can_use_tma(target)
            if tma and max(self.tile_m, self.tile_n) > blocking.TMA_EXTENT:
                raise ConfigError(f"{op}: TMA moves tiles up to {blocking.TMA_EXTENT}")
            return
        if not problem.can_use_sm90(target):
            raise ConfigError(
                f"{op}: template='sm90' with {problem.dtype} on {target}, ranks by nodes "
                f"{problem.nodes}; it takes 16-bit operands with rows of a multiple of "
                f"{blocking.TMA_BYTES} bytes, compute capability 9.0 and ranks of one node"
            )
        gemm_sm90.check(op, *self.tile, self.num_stages, target)

    @property
    def is_by_packets(self) -> bool:
        return self.transport in LL

    @property
    def is_fused(self) -> bool:
        return self.transport in (SM_PUSH, CE_PUSH, *LL)

    @property
    def blocking(self) -> Blocking:
        return Blocking(*self.tile, self.num_warps, self.num_stages)


def fused(problem: Any, target: Target) -> Iterator[Config]:
    """Configurations in which one kernel of the GEMM template does all, the one that is predicted
    to end first first: one of each transport and tile."""
    if problem.can_use_sm90(target) and not problem.is_empty:
        found = []
        # WIDER is predicted to be first at no size of the layers that are read.
        for cut in (gemm_sm90.TURNS, gemm_sm90.WIDE, gemm_sm90.MIDDLE):
            one = _cut(cut, problem, template="sm90")
            sent = [one]
            if problem.num_ranks <= scatter.MOST_PEERS + 1:
                sent.append(replace(one, by_tma=True))
            for alike in (sent, list(_by_engines(one, problem))):
                rated = [(_predicted_us(way, problem, target), way) for way in alike]
                found += sorted(rated, key=lambda rate: rate[0])[:1]
        yield from (way for _, way in sorted(found, key=lambda rate: rate[0]))
        return
    cuts = list(blocking.candidates(problem.m, problem.n, problem.k, problem.dtype, target))
    for cut in cuts[:MOST_CUTS]:
        height = min(cut.tile_m, max(16, 1 << (problem.rows - 1).bit_length()))
        yield (one := _cut(replace(cut, tile_m=height), problem))
        if cut is cuts[0]:
            yield from _by_engines(one, problem)


def by_packets(problem: Any, target: Target, one_shot_rows: int) -> list[Config]:
    """Configurations for small m, where all ranks are near: one_shot_ll first up to so many rows
    times peers."""
    if problem.is_empty or len(problem.nodes) > 1:
        return []
    is_one_shot = problem.m * (problem.num_ranks - 1) <= one_shot_rows
    ways = LL if is_one_shot else LL[::-1]
    cut = next(blocking.candidates(problem.m, problem.n, problem.k, problem.dtype, target))
    tile_m = min(64, max(16, 1 << (problem.m - 1).bit_length()))
    # Narrow tiles with many stages: as much of B under way as fits.
    if target.backend == "cuda" and problem.itemsize == 2 and problem.can_use_tma(target):
        cut = next(gemm_small.cuts(tile_m, problem.n, target))
    else:
        cut = replace(cut, tile_m=min(cut.tile_m, tile_m), num_warps=4)
    return [Config(transport=one, **asdict(cut)) for one in ways]


def _cut(cut: Blocking, problem: Any, **fields: Any) -> Config:
    tiles_m = ceil(problem.rows / cut.tile_m)
    return Config(**asdict(cut), group_m=group_m(problem.num_ranks, tiles_m), **fields)


def _by_engines(one: Config, problem: Any) -> Iterator[Config]:
    """The same where copy engines carry tiles, in few chunks or in several."""
    if CE_PUSH in problem.transports and len(problem.nodes) <= 1 and problem.num_ranks > 1:
        # Programs of one turn are in one part's tiles.
        together = group_m(1, ceil(problem.rows / one.tile_m))
        for chunks in products.CARRIED_CHUNKS:
            if are_alike(problem.n, chunks, one.tile_n):
                yield replace(one, transport=CE_PUSH, chunks=chunks, group_m=together)


def _predicted_us(config: Config, problem: Any, target: Target) -> float:
    """When all rows are summed, to the nanosecond: of ways that end together the one in fewer
    chunks comes first."""
    one = products.Product(
        problem.m, problem.n, problem.k, problem.num_ranks, config.tile, problem.itemsize
    )
    machine = hardware_of(target)
    assert machine is not None, f"{target} has the template for Hopper, but no record"
    if config.transport == CE_PUSH:
        return round(products.carried_us(one, machine, config.chunks), 3)
    return round(products.scattered_us(one, machine, by_tma=config.by_tma), 3)


def group_m(num_ranks: int, tiles_m: int) -> int:
    """Of a part's rows of tiles: about as many rows of tiles as columns, of all ranks' parts
    together, are multiplied at a time.

    Groups are alike: in a low one each tile would bring a column of B along.
    """
    most = max(1, TOGETHER // num_ranks)
    return max(1, ceil(tiles_m / max(1, ceil(tiles_m / most))))


def head_of(m: int, rank_rows: int, tile_m: int, own_first: bool) -> int:
    """Rows of tiles that are a group by themselves, of m gathered rows."""
    num_m = ceil(m / tile_m)
    # Where no tile is one rank's alone, none can go first, and B is read once.
    return min(rank_rows // tile_m if own_first else 0, num_m) or max(1, num_m)


def planned(program: Program, config: Schedule, problem: Any, target: Target) -> pipeline.Stages:
    """The plan of a traced program of one product and one collective, which runs as `config` says.
    `m` is its one open size: calls of a class of sizes get one plan."""
    nodes = problem.nodes if len(problem.nodes) > 1 else ()
    is_far = config.transport == SM_PUSH and len(nodes) > 1
    engine = "sm_put" if is_far else config.transport
    chunks = config.chunks if config.transport == CE_PUSH else 0
    return planned_by(program, config, engine, problem, target, chunks=chunks, nodes=nodes)


def planned_by(
    program: Program, config: Schedule, engine: str, problem: Any, target: Target, *,
    chunks: int = 0, nodes: tuple[int, ...] = (),
) -> pipeline.Stages:  # fmt: skip
    """The same by an engine, in so many chunks; `nodes` as far as the plan's order follows them."""
    m, ranks = class_of(problem.m), problem.num_ranks
    return _planned(program, config, engine, chunks, m, ranks, target, nodes)


@lru_cache(maxsize=256)
def _planned(
    program: Program, config: Schedule, engine: str, chunks: int, m: int, num_ranks: int,
    target: Target, nodes: tuple[int, ...],
) -> pipeline.Stages:  # fmt: skip
    placed = pipeline.compile_program(program).tasks["place"]
    (product,) = [one.name for one in placed.tasks if one.kind in PRODUCTS]
    (collective,) = [one.name for one in placed.tasks if one.kind in ENGINES]
    tile = config.tile
    if placed.task(product).kind == "grouped_matmul":
        # Signals say which tokens are there, not which tiles: another variant may have others.
        tile = (tile[0], gemm_sm90.wide_columns(tile[1]), tile[2])
        if placed.task(collective).kind == "all_gather":
            is_fed = config.transport == SM_PUSH
            engine, chunks = ("feed", config.pushers) if is_fed else (CE_PUSH, 1)
    settings = Settings(
        tiles={product: tile}, engines={collective: engine},
        chunks={collective: chunks} if chunks else {},
    )  # fmt: skip
    stages = pipeline.overlap(placed, Facts({"m": m}, num_ranks, target, nodes), settings)
    kernel = stages.program.task(product).kernel
    return replace(stages, schedules={kernel: config})
