"""Schedules of a product of rows that all ranks have: which there are, which to take, their plans.

sm_push: communication CTAs of the product's launch store own rows to peers; ce_push: copy engines
do; relay: a kernel beside the product, by which rows cross to each other node once; ll: LL packets
bring the rows, for small m; all_gather and the library's: weft's collective or NCCL's, then cuBLAS.
A `problem` is of weft.plan.gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from math import ceil
from typing import Any, NamedTuple

from weft.base import fields
from weft.base.target import Target
from weft.compiler import pipeline, schedules
from weft.compiler.buckets import by_bucket
from weft.compiler.cost import products
from weft.compiler.cost.choose import SMALL_M, most_chunks, relayed_chunks
from weft.compiler.cost.products import Product
from weft.compiler.schedules import (
    CE_PUSH,
    LIBRARY,
    RELAY,
    SM_PUSH,
    cut_for_scales,
    cuts_of,
    depth_of,
    head_of,
    machine_of,
    planned_by,
    unfused_us,
)
from weft.ir.schedule import Schedule, relays_on
from weft.ir.task import Program
from weft.tiles import blocking, gemm_sm90, gemm_small, tile_scheduler
from weft.tiles.blocking import Blocking

LL, UNFUSED = "ll", "all_gather"
TRANSPORTS = (CE_PUSH, SM_PUSH, LL)  # of one node
# In the compiler's words.
ENGINES = {CE_PUSH: "ce_push", SM_PUSH: "pushers", RELAY: "relay", LL: "one_shot_ll"}
TILE = (128, 256, 64)

# Up to so many bytes of A per rank the SMs push; more where the product is too narrow to hide a
# copy engine's start behind it (4 x H200, m 512 to 4096: push ahead up to 4 MiB, at n 2560 to 8).
PUSH_BYTES, NARROW_PUSH_BYTES, NARROW_N = 4 << 20, 8 << 20, 4096
# Copy engines are behind SMs up to so many bytes of a shard, and ahead of them from so many on.
FEWEST_PUT_BYTES, MOST_PUSHED_BYTES = 1 << 20, 16 << 20
# Of the template for Hopper, candidates of a call: of all there are eight at most.
MOST_ON_HOPPER = 3
# An SM that the persistent grid leaves free, so that what takes the slot can run beside it.
SPARE_SMS = 1
# Communication CTAs: enough to fill the links, not so many that products wait for them.
MIN_PUSHERS, MAX_PUSHERS = 20, 64
# What one of them stores of a chunk, beside others that store more of it.
PUSH_PIECE_BYTES = 64 << 10
MOST_SPLITS = 8


@dataclass(frozen=True)
class Config(schedules.Config):
    """How a call is done, as `Schedule` says."""

    transport: str = CE_PUSH
    tile_n: int = 256
    chunks: int = 2
    pushers: int = 16

    def check(self, problem: Any, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        if self.transport == SM_PUSH:
            fields.check_ranges(problem.op, self, pushers=(1, 1024))
        super().check(problem, target)

    def unfit(self, problem: Any, target: Target) -> Iterator[str]:
        yield from super().unfit(problem, target)
        if not self.is_fused:
            return
        if self.transport == RELAY and problem.scaling:
            yield (
                f"transport={self.transport!r} of {problem.dtype}; scales are not relayed: take "
                f"transport={SM_PUSH!r}"
            )
        programs, early = programs_on(target, self.transport), own_tiles(problem, self)
        if self.num_pushers > programs:
            yield (
                f"pushers={self.pushers}; {target} has {target.num_sms} SMs, of which {SPARE_SMS} "
                f"is kept free: take at most {programs}, which run at once"
            )
        first = f"first_wave={self.first_wave}"
        if self.first_wave > 1 and not self.own_first:
            yield (
                f"{first}: own rows' tiles are the first wave only where they come first: take "
                "own_first=True"
            )
        if self.first_wave > 1 and (self.template != "sm90" or early * self.first_wave > programs):
            yield (
                f"{first} for {early} tiles of own rows with template={self.template!r}; 'sm90' "
                f"takes up to {max(1, programs // early)}, since their parts run on {programs} SMs "
                "at once, the others 1"
            )

    def check_blocking(self, problem: Any, target: Target) -> None:
        tma = self.tma and problem.can_use_tma(target)
        self.blocking.check(problem.op, problem.dtype, problem.out_dtype, tma, target)

    @property
    def num_pushers(self) -> int:
        return self.pushers if self.transport == SM_PUSH else 0


def programs_on(target: Target, transport: str = "") -> int:
    """How many programs of the product may run at once."""
    spare = relays_on(target) if transport == RELAY else SPARE_SMS
    return max(1, target.num_sms - spare)


def can_relay(problem: Any) -> bool:
    """Can other nodes' rows be passed on to near ranks? Scales go before rows to all ranks, whom
    the words of those who pass rows on do not tell of them."""
    return schedules.can_relay(problem) and not problem.scaling


def straddles(problem: Any, config: Schedule) -> bool:
    """Are there tiles that hold rows of several ranks? Those are read from the slot alone."""
    is_even = problem.m == problem.rows * problem.num_ranks
    return problem.num_ranks > 1 and not (is_even and problem.rows % config.tile_m == 0)


def transports(problem: Any, target: Target, push_bytes: int = PUSH_BYTES) -> tuple[str, ...]:
    """What may bring the rows, what is taken unmeasured first: SMs up to so many bytes a rank."""
    if can_relay(problem) and target.num_sms > relays_on(target):
        return (RELAY, SM_PUSH)
    if len(problem.nodes) > 1 or target.num_sms <= SPARE_SMS or problem.num_ranks == 1:
        return (SM_PUSH,)  # of one rank there is nothing to copy
    return (SM_PUSH, CE_PUSH) if problem.shard_bytes <= push_bytes else (CE_PUSH, SM_PUSH)


def candidates(problem: Any, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    limit = NARROW_PUSH_BYTES if problem.n <= NARROW_N else PUSH_BYTES
    order = transports(problem, target, limit)
    by_packets = list(_by_packets(problem, target)) if len(problem.nodes) <= 1 else []
    if problem.m <= SMALL_M and target.backend != "emu":
        yield from by_packets
    can_use = problem.can_use_sm90(target) and (problem.m > SMALL_M or not by_packets)
    on_hopper = _on_hopper(problem, target, tuple(order)) if can_use else ()
    if problem.m > SMALL_M:
        yield from on_hopper
    # One of each transport where the template for Hopper has them too.
    most = 1 if on_hopper else 2
    for transport in order:
        cuts = blocking.candidates(problem.m, problem.n, problem.k, problem.dtype, target)
        for cut in islice(cuts, most):
            config = Config(transport=transport, **vars(cut_for_scales(cut, problem)))
            yield with_transport(config, problem, target)
    if problem.m > SMALL_M or target.backend == "emu":
        yield from by_packets[:1]
    else:
        yield from on_hopper
    if problem.can_use_unfused:
        yield Config(transport=UNFUSED)
    if problem.can_use_library(target):
        yield Config(transport=LIBRARY)


def _by_packets(problem: Any, target: Target) -> Iterator[Config]:
    """What packets can do, if rows are few."""
    if problem.is_empty or problem.itemsize not in (2, 4):
        return
    if target.backend != "emu" and problem.m > 4 * SMALL_M:
        return
    for cut in _small_cuts(problem, target):
        yield Config(transport=LL, chunks=1, pushers=0, **vars(cut))


def _small_cuts(problem: Any, target: Target) -> Iterator[Blocking]:
    """Narrow tiles with many stages: as much of B under way as fits."""
    usual = next(blocking.candidates(problem.m, problem.n, problem.k, problem.dtype, target))
    tile_m = min(64, max(16, 1 << (problem.m - 1).bit_length()))
    if target.backend != "cuda" or problem.itemsize != 2 or not problem.can_use_tma(target):
        yield replace(usual, tile_m=min(usual.tile_m, tile_m), num_warps=4)
        return
    yield from gemm_small.cuts(tile_m, problem.n, target)


# A problem's calls are rated once, recorded or not.
@lru_cache(maxsize=64)
def _on_hopper(problem: Any, target: Target, transports: tuple[str, ...]) -> tuple[Config, ...]:
    """What the template for Hopper can do, the one first that is predicted to end first: for each
    transport and each of its tiles, with what else is best of it."""
    if problem.is_empty:
        return ()
    # WIDER is left out until it has been read here: it is predicted to be first at few sizes of
    # one round (2 ranks, n 2560, m 2048: 133 us by push, 141 so), where no tile hides a wait.
    cuts = (gemm_sm90.WIDE, gemm_sm90.TURNS, gemm_sm90.MIDDLE)
    rated = []
    for transport in filter(partial(_is_worth_rating, problem), transports):
        for cut in cuts_of(problem, cuts):
            plain = Config(transport=transport, template="sm90", **vars(cut))
            ways = list(ways_of(with_transport(plain, problem, target), problem, target))
            us = [end_us(plain, problem, target, way) for way in ways]
            best = min(range(len(ways)), key=us.__getitem__)
            rated.append((us[best], replace(plain, **ways[best]._asdict())))
    return tuple(config for _, config in sorted(rated, key=lambda one: one[0])[:MOST_ON_HOPPER])


def _is_worth_rating(problem: Any, transport: str) -> bool:
    """Could it end first, and does it bring rows to the template for Hopper?"""
    if len(problem.nodes) > 1:
        return transport == RELAY
    if transport == SM_PUSH:
        return problem.num_ranks == 1 or problem.shard_bytes <= MOST_PUSHED_BYTES
    return problem.shard_bytes >= FEWEST_PUT_BYTES


class Way(NamedTuple):
    """What is left to choose where transport and tile are given; fields of Config."""

    group_m: int
    own_first: bool
    chunks: int
    first_wave: int
    pushers: int


def ways_of(base: Config, problem: Any, target: Target) -> Iterator[Way]:
    """Larger groups read B less often, but wait for more rows; so do all rows alike."""
    first = Way(*[getattr(base, name) for name in Way._fields])
    some = dict.fromkeys((first, first._replace(group_m=8)))
    yield from some
    if base.transport != RELAY:  # by nodes own tiles always come first
        yield first._replace(group_m=8, own_first=False)
    if base.transport == CE_PUSH and first.chunks == 1 and problem.rows > 1:
        some[first._replace(chunks=2)] = None
        yield first._replace(chunks=2)
    if problem.num_ranks == 1 or straddles(problem, base):
        return
    # Programs without an own tile would wait for rows; with a part of one they need not.
    early, programs = own_tiles(problem, base), programs_on(target, base.transport)
    most = tile_scheduler.first_wave_of(early, ceil(problem.k / base.tile_k), programs)
    for way in some if most > 1 else ():
        for parts in range(2, most + 1):
            one = way._replace(first_wave=parts)
            # Those who push, the last ones, need have none.
            peers = (problem.num_ranks - 1) * way.chunks
            pieces = (programs - parts * early) // peers
            if base.transport == SM_PUSH and 0 < pieces < pieces_of(problem, way):
                one = one._replace(pushers=pieces * peers)
            yield one


def pieces_of(problem: Any, way: Any) -> int:
    """Communication CTAs that share one chunk's way to one rank."""
    return ceil(way.pushers / (max(1, problem.num_ranks - 1) * way.chunks))


def end_us(config: Config, problem: Any, target: Target, way: Way | None = None) -> float:
    """When a call on Hopper would end, as predicted: rows are read in place."""
    if config.template != "sm90":
        few = Product(problem.m, problem.n, problem.k, 1, config.tile)
        return products.few_rows_us(few, machine_of(target), config.transport == LL)
    way = way or Way(*[getattr(config, name) for name in Way._fields])
    k, tile_k = (depth_of(extent, problem) for extent in (problem.k, config.tile_k))
    head = head_of(problem.m, problem.rows, config.tile_m, way.own_first)
    product = Product(
        problem.m, problem.n, k, problem.num_ranks, (config.tile_m, config.tile_n, tile_k),
        group_m=way.group_m, head=head, first_wave=way.first_wave,
        num_nodes=max(1, len(problem.nodes)),
    )  # fmt: skip
    return products.gathered_us(
        product, machine_of(target), config.transport, chunks=way.chunks,
        num_programs=programs_on(target, config.transport),
        pushers=pieces_of(problem, way) * way.chunks * max(1, problem.num_ranks - 1),
    )  # fmt: skip


def predict(problem: Any, target: Target, config: Config) -> float | None:
    """When a recorded call would end, in us; None where nothing is predicted."""
    if problem.is_empty or not problem.can_use_sm90(target):
        return None
    if not config.is_fused:
        return unfused_us(problem, target, UNFUSED)
    if config.template == "sm90":
        return end_us(config, problem, target) * products.of_few_rows(problem.m)
    return end_us(config, problem, target) if problem.m <= SMALL_M else None


def with_transport(config: Config, problem: Any, target: Target) -> Config:
    """`config` with what follows from its transport, the sizes and the target."""
    # A group that reached into the next rank's rows would wait while own tiles are left.
    config = replace(config, group_m=max(1, min(8, problem.rows // config.tile_m)))
    programs = programs_on(target, config.transport)
    tiles = config.blocking.num_tiles(*problem.result)
    peers = max(1, problem.num_ranks - 1)
    if config.transport == CE_PUSH:
        most = most_chunks(problem.shard_bytes, target)
        return replace(config, pushers=0, chunks=max(1, min(most, problem.rows)))
    if config.transport == RELAY:
        sizes = problem.rows, problem.shard_bytes, len(problem.nodes)
        chunks = relayed_chunks(*sizes, target)
        return replace(config, pushers=0, chunks=chunks)
    if config.template == "sm90":
        # Nothing else runs beside them.
        pushers = max(peers, ceil(problem.shard_bytes * peers / PUSH_PIECE_BYTES))
        chunks = 1
    else:
        # Programs without a tile in the last round have the time.
        pushers = min(max(-tiles % programs, MIN_PUSHERS), MAX_PUSHERS)
        chunks = max(1, min(problem.rows // config.tile_m, 8))
    pushers = min(3 if target.backend == "emu" else pushers, programs)
    return replace(config, pushers=pushers, chunks=chunks)


@by_bucket
def choose(problem: Any, target: Target, is_recorded: bool = False) -> Config:
    """The configuration to take when nothing was measured: a pure function of these."""
    fused = next(candidates(problem, target))
    can_be = problem.can_use_sm90(target) and problem.can_use_unfused
    if not can_be or problem.is_empty:
        return fused
    us = predict(problem, target, fused)
    pays = schedules.pays(us, problem, target, UNFUSED, is_recorded)
    return fused if pays else Config(transport=UNFUSED)


def splits_of(tiles: int, segments: int, programs: int) -> int:
    """Of what a product sums over the rows of all ranks, in so many segments: as many splits as
    programs would have no tile without. Each but the last costs a tile's way through memory."""
    return max(1, min(programs // max(1, tiles), segments, MOST_SPLITS))


def own_tiles(problem: Any, config: Schedule) -> int:
    """How many tiles of the order need no other rank's rows."""
    head = head_of(problem.m, problem.rows, config.tile_m, config.own_first)
    return head * ceil(problem.n / config.tile_n)


def planned(program: Program, config: Schedule, problem: Any, target: Target) -> pipeline.Stages:
    """The plan of a traced program of one gather and one product, which runs as `config` says."""
    engine = ENGINES[config.transport]
    if config.transport == CE_PUSH and problem.num_ranks == 1:
        engine = ENGINES[SM_PUSH]  # there is nothing to copy
    return planned_by(program, config, engine, problem, target, config.chunks)
