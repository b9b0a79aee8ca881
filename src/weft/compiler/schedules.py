"""Schedules of a product that is summed over ranks: which there are, and the plan of each.

A `problem` says m, n and k, the dtype, the ranks and their nodes, and which `transports` its
operator has: sm_push (SMs store tiles to peers), relay (other nodes' to partners on the own node,
who send one sum on), ce_push (copy engines do), ce_parts (they do, behind a launch for each chunk
of columns), one_shot_ll and two_shot_ll (LL packets, for small m), one in which nothing is fused,
and the library's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

from weft.base import fields
from weft.base.errors import ConfigError
from weft.base.hardware import Hardware, hardware_of
from weft.base.target import Target
from weft.compiler import pipeline
from weft.compiler.cost import libraries, products
from weft.compiler.cost.choose import relayed_us, staged_chunks
from weft.compiler.facts import Facts, Settings, class_of
from weft.ir.kinds import PRODUCTS
from weft.ir.schedule import Schedule, relays_on
from weft.ir.task import ENGINES, LL, Program, Task, are_alike
from weft.tiles import blocking, gemm, gemm_sm90, gemm_small, multiply_sm90
from weft.tiles.blocking import Blocking
from weft.tiles.hooks import scatter

SM_PUSH, CE_PUSH, RELAY, LIBRARY = "sm_push", "ce_push", "relay", "nccl"
# Copy engines carry tiles behind the launches that made them: what recordings can have of CE_PUSH.
CE_PARTS = "ce_parts"
BY_ENGINES = (CE_PUSH, CE_PARTS)
# What reaches other nodes.
FAR = (SM_PUSH, RELAY)
TEMPLATES = ("plain", "sm90")
PACKETS = ("ll", *LL)
# What is fused must be predicted to end in so much of the unfused way's time: predictions are 5 %
# off on average.
MARGIN = 0.96
# How fp8 operands have their scales, where each block has one, and how large that is.
BLOCKS, BLOCK_K = "blocks", gemm.BLOCK_K.value
# What GPUs multiply this dtype from, by compute capability.
E4M3, E4M3_ARCH = "float8_e4m3fn", 89
# Fields that count something.
COUNTS = ("chunks", "group_m", "first_wave", "last")
# Cuts of the generic template that are worth a measurement.
MOST_CUTS = 2


@dataclass(frozen=True)
class Config(Schedule):
    """How a call is done, as `Schedule` says."""

    def check(self, problem: Any, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        op = problem.op
        fields.check_one_of(op, self, "transport", problem.transports)
        if self.is_fused:
            fields.check_one_of(op, self, "template", problem.templates)
            fields.check_ranges(op, self, **dict.fromkeys(COUNTS, (1, 1024)))
        for message in self.unfit(problem, target):
            raise ConfigError(f"{op}: {message}")
        if self.is_fused and self.template == "sm90":
            gemm_sm90.check(op, *self.tile, self.num_stages, target, problem.itemsize)
        elif self.is_fused:
            self.check_blocking(problem, target)

    def unfit(self, problem: Any, target: Target) -> Iterator[str]:
        """What does not fit the problem, the target or another field, and what to do."""
        way, num_nodes = f"transport={self.transport!r}", len(problem.nodes)
        if self.transport == LIBRARY and not problem.can_use_library(target):
            yield (
                f"{way} for m={problem.m} on {problem.num_ranks} ranks, {problem.dtype}, on "
                f"{target}; it takes NVIDIA GPUs, and shards of one size{problem.of_library}"
            )
        if not self.is_fused and not problem.library_takes(target):
            yield (
                f"{way} of {problem.dtype} and {problem.out_dtype}, scaling={problem.scaling!r}, "
                f"b_is_nk={problem.b_is_nk}, n={problem.n}, k={problem.k} on {target}; torch's "
                f"product is taken of {E4M3}, with scales of rows, b as [n, k], n and k in "
                "multiples of 16 and results in bfloat16, on compute capability 9.0: take "
                f"transport={SM_PUSH!r}"
            )
        if not self.is_fused:
            return
        if self.transport not in FAR and num_nodes > 1:
            what = "packets" if self.is_by_packets else "copy engines"
            yield (
                f"{way} on {num_nodes} nodes; {what} reach the ranks of one node only: take "
                f"transport={SM_PUSH!r}"
            )
        if self.transport == RELAY and not can_relay(problem):
            yield (
                f"{way} on ranks by nodes {problem.nodes}; it takes several nodes, one of several "
                f"ranks: take transport={SM_PUSH!r}"
            )
        if self.template == "sm90" and self.is_by_packets:
            yield f"template='sm90' with {way}; take template='plain'"
        if (self.template == "sm90" and self.transport == SM_PUSH and num_nodes > 1
                and problem.sends_tiles):  # fmt: skip
            yield (
                f"template='sm90' with {way} on {num_nodes} nodes; tiles do not reach other nodes "
                f"from Gluon: take template='plain', or {RELAY!r}"
            )
        if self.by_tma and self.transport == RELAY:
            yield f"by_tma with {way}; partners' tiles leave by stores of threads: take False"
        if self.template == "sm90" and not problem.can_use_sm90(target):
            has, takes = problem.of_sm90
            yield (
                f"template='sm90' with {problem.dtype}{has} on {target}, ranks by nodes "
                f"{problem.nodes}; it takes {takes} in rows of a multiple of "
                f"{blocking.TMA_BYTES} bytes, compute capability 9.0 or emulated arch=90, and "
                "ranks of one node: take template='plain'"
            )
        if problem.is_summed and not are_alike(problem.n, self.chunks, self.tile_n):
            yield (
                f"chunks={self.chunks} of n={problem.n} columns in tiles of {self.tile_n}; several "
                "chunks must be alike, of whole tiles: take 1, or such that chunks * tile_n "
                "divides n"
            )
        if self.by_tma and self.transport == SM_PUSH and problem.num_ranks > scatter.MOST_PEERS + 1:
            yield (
                f"by_tma with {problem.num_ranks} ranks; a kernel takes descriptors of "
                f"{scatter.MOST_PEERS} peers: take by_tma=False"
            )
        yield from self._unfit_for_scales(problem, target)

    def _unfit_for_scales(self, problem: Any, target: Target) -> Iterator[str]:
        dtype = problem.dtype
        if dtype == E4M3 and target.backend == "cuda" and int(target.arch) < E4M3_ARCH:
            yield f"{dtype} on {target}; it needs compute capability 8.9: convert a and b"
        if problem.scaling and self.is_by_packets:
            yield (
                f"transport={self.transport!r} of {dtype}; what packets carry has no scales: take "
                f"transport={SM_PUSH!r}"
            )
        if problem.scaling and self.transport == CE_PARTS:
            yield (
                f"transport={CE_PARTS!r} of {dtype}; its launches take no scales: take "
                f"transport={SM_PUSH!r}"
            )
        is_larger = BLOCK_K % self.tile_n or BLOCK_K % self.tile_k
        if problem.scaling == BLOCKS and is_larger:
            yield (
                f"tile_n={self.tile_n}, tile_k={self.tile_k} where each block of {BLOCK_K} has its "
                "scale; both must divide it"
            )

    def check_blocking(self, problem: Any, target: Target) -> None:
        """Raises  ConfigError: a tile that the generic template cannot run there"""
        op = problem.op
        # C does not leave by TMA, so it takes no shared memory.
        self.blocking.check(op, problem.dtype, problem.dtype, False, target)
        is_read = self.tma and not self.is_by_packets and problem.can_use_tma(target)
        if is_read and max(self.tile_m, self.tile_n) > blocking.TMA_EXTENT:
            raise ConfigError(f"{op}: TMA moves tiles up to {blocking.TMA_EXTENT}")

    @property
    def is_by_packets(self) -> bool:
        return self.transport in PACKETS

    @property
    def is_fused(self) -> bool:
        return self.transport in (*FAR, *BY_ENGINES, *PACKETS)

    @property
    def blocking(self) -> Blocking:
        return Blocking(*self.tile, self.num_warps, self.num_stages)


def fused(problem: Any, target: Target) -> Iterator[Config]:
    """Configurations in which one kernel of the GEMM template does all, the one that is predicted
    to end first first: one of each transport and tile."""
    relays = can_relay(problem) and target.num_sms > relays_on(target)
    far = (RELAY,) if relays else ()
    if problem.can_use_sm90(target) and not problem.is_empty:
        found = []
        # WIDER is predicted to be first at no size of the layers that are read.
        for cut in cuts_of(problem, (gemm_sm90.TURNS, gemm_sm90.WIDE, gemm_sm90.MIDDLE)):
            one = _cut(cut, problem, template="sm90", transport=(*far, SM_PUSH)[0])
            sent = [one]
            if problem.num_ranks <= scatter.MOST_PEERS + 1 and not far:
                sent.append(replace(one, by_tma=True))
            alike = [sent]
            if cut != gemm_sm90.MIDDLE:  # of 144 sizes engines carry it first at two, by 1 %
                alike.append(list(_by_engines(one, problem, CE_PUSH)))
            if cut == gemm_sm90.WIDE:  # two kernels more; narrow ones would be first by 2 % at most
                alike.append(list(_by_engines(one, problem, CE_PARTS)))
            found += [_best(some, problem, target) for some in alike if some]
        yield from (way for _, way in sorted(found, key=lambda rate: rate[0]))
        if not far:
            return
        far = ()
    cuts = list(blocking.candidates(problem.m, problem.n, problem.k, problem.dtype, target))
    cuts = list(dict.fromkeys(cut_for_scales(cut, problem) for cut in cuts[:MOST_CUTS]))
    for cut in cuts:
        height = min(cut.tile_m, max(16, 1 << (problem.rows - 1).bit_length()))
        one = _cut(replace(cut, tile_m=height), problem)
        yield from (replace(one, transport=way) for way in (*far, SM_PUSH))
        if cut is cuts[0]:
            yield from _by_engines(one, problem, CE_PUSH)
            yield from [*_by_engines(one, problem, CE_PARTS)][:1]


def _best(alike: Sequence[Config], problem: Any, target: Target) -> tuple[float, Config]:
    """The one that is predicted to end first, and when."""
    rated = [(_predicted_us(way, problem, target), way) for way in alike]
    return min(rated, key=lambda rate: rate[0])


def cuts_of(problem: Any, cuts: Sequence[Blocking]) -> Sequence[Blocking]:
    """Of the template for Hopper: of fp8 it has one."""
    return cuts if problem.itemsize > 1 else (gemm_sm90.PROMOTED,)


def cut_for_scales(cut: Blocking, problem: Any) -> Blocking:
    """The cut, or less: where each block has a scale, a tile's step lies within one."""
    if problem.scaling != BLOCKS:
        return cut
    return replace(cut, tile_n=min(BLOCK_K, cut.tile_n), tile_k=min(BLOCK_K, cut.tile_k))


def depth_of(k: int, problem: Any) -> int:
    """So many k in the cost model's, which is of 16-bit operands: fp8 are half of the bytes at
    twice the rate, as half of k is."""
    return k * problem.itemsize // 2


# Where owners hand sums to all ranks nobody multiplies meanwhile, unless tiles are narrow: wide
# ones take 1.0 to 1.25 of the time (2 x H200, four layers, m 512 to 8192). Where k is long narrow
# ones take 1.04 to 1.17 of theirs (k 13312, m 1024 to 8192; 0.97 at 512).
LONG_K, LONG_M = 10240, 1024


def reducing(problem: Any, target: Target) -> list[Config]:
    """`fused`, of sums that all ranks get. Of Hopper's tiles narrow ones are first, unless k is
    long."""
    is_wide = problem.k >= LONG_K and problem.m >= LONG_M
    found = list(fused(problem, target))
    if problem.can_use_sm90(target) and len(problem.nodes) <= 1:
        found.sort(key=lambda config: (config.tile_n > 128) != is_wide)
    return found


def can_relay(problem: Any) -> bool:
    """Are there other nodes, and near ranks for whom one deals with them?"""
    is_far = len(problem.nodes) > 1 and max(problem.nodes) > 1
    return is_far and RELAY in problem.transports


def may_pay(problem: Any, target: Target) -> bool:
    """Over several nodes, is a relayed sum predicted to be worth it? Emulated, where nothing is
    predicted, what can be relayed is."""
    if len(problem.nodes) <= 1:
        return True
    way = next((one for one in fused(problem, target) if one.transport == RELAY), None)
    us = predict(problem, target, way) if way else None
    pays_off = us is not None and pays(us, problem, target, problem.unfused.op, True)
    return pays_off or (way is not None and target.backend == "emu")


def by_packets(problem: Any, target: Target, one_shot_rows: int) -> list[Config]:
    """Configurations for small m, where all ranks are near: one_shot_ll first up to so many rows
    times peers."""
    if problem.is_empty or problem.scaling or len(problem.nodes) > 1:
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


def unfused(problem: Any, target: Target) -> list[Config]:
    """torch's product and weft's collective, where torch takes the operands."""
    return [Config(transport=problem.unfused.op)] if problem.library_takes(target) else []


def _cut(cut: Blocking, problem: Any, **more: Any) -> Config:
    tiles_m = ceil(problem.rows / cut.tile_m)
    return Config(**asdict(cut), group_m=group_m(problem.num_ranks, tiles_m), **more)


def _by_engines(one: Config, problem: Any, by: str) -> Iterator[Config]:
    """The same where copy engines carry tiles, in few chunks or in several."""
    if by == CE_PARTS and problem.scaling:
        return
    if by in problem.transports and len(problem.nodes) <= 1 and problem.num_ranks > 1:
        # Programs of one turn are in one part's tiles.
        together = group_m(1, ceil(problem.rows / one.tile_m))
        for chunks in staged_chunks(problem.n, one.tile_n, by):
            yield replace(one, transport=by, chunks=chunks, group_m=together)


def machine_of(target: Target) -> Hardware:
    """What is known where the template for Hopper runs."""
    machine = hardware_of(target)
    assert machine is not None, f"{target} has the template for Hopper, but no record"
    return machine


def _predicted_us(config: Config, problem: Any, target: Target) -> float:
    """When all rows are summed, to the nanosecond: of ways that end together the one in fewer
    chunks comes first."""
    tile_m, tile_n, tile_k = config.tile
    tile, k = (tile_m, tile_n, depth_of(tile_k, problem)), depth_of(problem.k, problem)
    nodes = max(1, len(problem.nodes))
    one = products.Product(problem.m, problem.n, k, problem.num_ranks, tile, num_nodes=nodes)
    machine = machine_of(target)
    if config.transport == RELAY:
        return round(relayed_us(one, machine, problem.unfused.op), 3)
    if config.transport == CE_PUSH:
        return round(products.staged_us(one, machine, config.chunks), 3)
    if config.transport == CE_PARTS:
        return round(products.in_parts_us(one, machine, config.chunks), 3)
    return round(products.scattered_us(one, machine, by_tma=config.by_tma), 3)


def predict(problem: Any, target: Target, config: Config) -> float | None:
    """When all rows are summed, in us; None where nothing is predicted."""
    if problem.is_empty or not problem.can_use_sm90(target):
        return None
    if not config.is_fused:
        return unfused_us(problem, target, problem.unfused.op)
    return _predicted_us(config, problem, target) if config.template == "sm90" else None


def pays(
    fused_us: float | None, problem: Any, target: Target, kind: str, is_recorded: bool
) -> bool:
    """Is a fused way worth it beside a product and a collective? What their launches cost the host
    shows unless they are recorded. Where nothing is predicted, or torch has no such product, it
    is."""
    if fused_us is None or not problem.library_takes(target):
        return True
    us = unfused_us(problem, target, kind)
    if not is_recorded:
        us = max(us, machine_of(target).library_host_us)
    return fused_us <= MARGIN * us


def unfused_us(problem: Any, target: Target, kind: str) -> float:
    """cuBLAS, then the best collective of that kind, or before it."""
    nodes, k = max(1, len(problem.nodes)), depth_of(problem.k, problem)
    one = products.Product(problem.m, problem.n, k, problem.num_ranks, (1, 1, 1), num_nodes=nodes)
    return libraries.unfused_us(one, machine_of(target), kind)


def group_m(num_ranks: int, tiles_m: int) -> int:
    """Of a part's rows of tiles: about as many rows of tiles as columns, of all ranks' parts
    together, are multiplied at a time.

    Groups are alike: in a low one each tile would bring a column of B along.
    """
    most = max(1, products.TOGETHER // num_ranks)
    return max(1, ceil(tiles_m / max(1, ceil(tiles_m / most))))


def head_of(m: int, rank_rows: int, tile_m: int, own_first: bool) -> int:
    """Rows of tiles that are a group by themselves, of m gathered rows."""
    num_m = ceil(m / tile_m)
    # Where no tile is one rank's alone, none can go first, and B is read once.
    return min(rank_rows // tile_m if own_first else 0, num_m) or max(1, num_m)


def planned(program: Program, config: Schedule, problem: Any, target: Target) -> pipeline.Stages:
    """The plan of a traced program of one product and one collective, which runs as `config` says.
    `m` is its one open size: calls of a class of sizes get one plan."""
    is_far = config.transport == SM_PUSH and len(problem.nodes) > 1
    engine = "sm_put" if is_far else config.transport
    chunks = config.chunks if config.transport in BY_ENGINES else 0
    return planned_by(program, config, engine, problem, target, chunks)


def planned_by(
    program: Program, config: Schedule, engine: str, problem: Any, target: Target, chunks: int = 0
) -> pipeline.Stages:
    """The same by an engine, in so many chunks."""
    m, ranks = class_of(problem.m), problem.num_ranks
    nodes = problem.nodes if len(problem.nodes) > 1 else ()
    return _planned(program, config, engine, chunks, m, ranks, target, nodes)


# A product has some seventy plans for all m; a model a few products.
@lru_cache(maxsize=1024)
def _planned(
    program: Program, config: Schedule, engine: str, chunks: int, m: int, num_ranks: int,
    target: Target, nodes: tuple[int, ...],
) -> pipeline.Stages:  # fmt: skip
    product, collective = _parts_of(_placed(program))
    tile = config.tile
    if product.kind == "grouped_matmul":
        # Signals say which tokens are there, not which tiles: another variant may have others.
        tile = (tile[0], multiply_sm90.wide_columns(tile[1]), tile[2])
        if collective.kind == "all_gather":
            ways = {SM_PUSH: ("feed", config.pushers), RELAY: (RELAY, config.chunks)}
            engine, chunks = ways.get(config.transport, (CE_PUSH, 1))
    stages = _overlapped(program, tile, engine, chunks, m, num_ranks, target, nodes)
    kernel = stages.program.task(product.name).kernel
    return replace(stages, schedules={kernel: config})


@lru_cache(maxsize=64)
def _placed(program: Program) -> Program:
    return pipeline.compile_program(program).tasks["place"]


def _parts_of(program: Program) -> tuple[Task, Task]:
    """The product and the collective."""
    (product,) = [one for one in program.tasks if one.kind in PRODUCTS]
    (collective,) = [one for one in program.tasks if one.kind in ENGINES]
    return product, collective


# All of a schedule that a plan asks: some ten plans of a product.
@lru_cache(maxsize=1024)
def _overlapped(
    program: Program, tile: tuple[int, int, int], engine: str, chunks: int, m: int, num_ranks: int,
    target: Target, nodes: tuple[int, ...],
) -> pipeline.Stages:  # fmt: skip
    placed = _placed(program)
    product, collective = (one.name for one in _parts_of(placed))
    settings = Settings(
        tiles={product: tile}, engines={collective: engine},
        chunks={collective: chunks} if chunks else {},
    )  # fmt: skip
    return pipeline.overlap(placed, Facts({"m": m}, num_ranks, target, nodes), settings)
