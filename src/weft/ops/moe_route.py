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

Limits  logits are contiguous; up to MOST_EXPERTS experts, top_k up to MOST_CHOSEN; NaN counts as
        -inf, and a token with no logit above that has weights of NaN
Source  the design's section 4; docs/decisions/009-hooks.md for the tables
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.card import Op, Trial, trials
from weft.base.dtypes import DTYPES
from weft.base.errors import ConfigError, ShapeError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.compiler import layouts
from weft.language import mapping, slots
from weft.ops import _lanes, _operations, _records
from weft.runtime.world import World
from weft.tiles import route

MOST_EXPERTS, MOST_CHOSEN = 1024, 64
# What a thread has of the logits that a program looks at together, and how many (token, k) these
# have: each of them is compared to all the others.
THREADS, THREAD_LOGITS, MOST_TOGETHER = 256, 16, 64


class Tables(NamedTuple):
    """What the router says. Slots are numbers among all m * top_k (token, k), sorted by expert.

    ids, weights: int32, fp32 [own tokens, top_k], the largest first. token_of: int32[slots] the
    token in a slot, weight_of: fp32[slots] its weight there; slot_of: int32[m, top_k]. counts:
    int32[num_ranks, experts] of each source. tiles: int32[5, tiles] expert, first, end, lo, hi:
    slots first .. end - 1, which tokens of ranks lo .. hi have; turns: int32[tiles] which is
    multiplied when, on this rank; num_tiles: int32[1], how many of them there are. Of those behind,
    first = end = 0.
    """

    ids: Any
    weights: Any
    token_of: Any
    weight_of: Any
    slot_of: Any
    counts: Any
    tiles: Any
    turns: Any
    num_tiles: Any


class Routing(NamedTuple):
    """What a call gives: its tables, and how many slots a tile of them has at most."""

    tables: Tables
    tile_m: int


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[Tables]:
    """All ranks at once."""
    value = torch.cat([one["logits"] for one in inputs]).float().nan_to_num(-torch.inf, torch.inf)
    chosen = value.sort(dim=1, descending=True, stable=True).indices[:, : problem.top_k]
    share = value.softmax(1).gather(1, chosen)
    if problem.renormalise:
        share = share / share.sum(1, keepdim=True)
    ids = chosen.to(torch.int32)
    return [tables(problem, rank, ids, share) for rank in range(problem.num_ranks)]


def tables(problem: Problem, rank: int, ids: torch.Tensor, weights: torch.Tensor) -> Tables:
    """One rank's tables for the experts and weights [m, top_k] of all tokens, on the CPU."""
    own, order = slice(*problem.shard(rank)), ids.flatten().sort(stable=True).indices
    slot_of = order.argsort()
    token_of = order // problem.top_k
    shards = [ids[slice(*problem.shard(source))] for source in range(problem.num_ranks)]
    counts = torch.stack([one.flatten().bincount(minlength=problem.n) for one in shards])
    cut = cut_tiles(problem, rank, counts.sum(0).tolist(), token_of)
    whole = [token_of, weights.flatten()[order], slot_of.view(ids.shape), counts, *cut]
    found = [ids[own], weights[own], *whole]
    return Tables(*[one.float() if one.is_floating_point() else one.int() for one in found])


def cut_tiles(problem: Any, rank: int, counts: Sequence[int], token_of: Any) -> list[torch.Tensor]:
    """tiles, turns and num_tiles of one rank, whose experts have so many slots each, on the CPU."""
    made = _tiles_of(problem, counts, token_of)
    late = [max((rank - s) % problem.num_ranks for s in range(lo, hi + 1)) for *_, lo, hi in made]
    turns = sorted(range(len(made)), key=late.__getitem__)
    spare = problem.max_tiles - len(made)
    table = torch.tensor([*made, *[(0,) * 5] * spare]).reshape(-1, 5).t().contiguous()
    turns = torch.tensor([*turns, *range(len(made), problem.max_tiles)])
    return [table, turns, torch.tensor([len(made)])]


def _tiles_of(problem: Any, counts: Sequence[int], token_of: Any) -> list[tuple[int, ...]]:
    """(expert, first, end, lo, hi) of every tile."""
    # At once: on a GPU each number that is asked for alone is waited for.
    sources = (token_of // problem.rows).tolist() if problem.rows else []
    found, begin = [], 0
    for expert, size in enumerate(counts):
        for first in range(begin, begin + size, problem.tile_m):
            end = min(first + problem.tile_m, begin + size)
            found.append((expert, first, end, sources[first], sources[end - 1]))
        begin += size
    return found


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_lanes.Rows):
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
        if not 1 <= self.top_k <= min(self.n, MOST_CHOSEN):
            raise ShapeError(
                f"{self.op}: top_k={self.top_k} of {self.n} experts; it must be between 1 and "
                f"{min(self.n, MOST_CHOSEN)}"
            )
        if self.tile_m < 1 or self.tile_m & (self.tile_m - 1):
            raise ShapeError(f"{self.op}: tile_m={self.tile_m}; it must be a power of two")
        if self.num_slots + self.n * self.tile_m >= 1 << 31:
            raise ShapeError(f"{self.op}: m={self.m} with top_k={self.top_k}: slots are int32")

    @property
    def num_slots(self) -> int:
        return self.m * self.top_k

    @property
    def max_tiles(self) -> int:
        return route.most_tiles(self.num_slots, self.n, self.tile_m)


@dataclass(frozen=True)
class Config:
    """Units  block: tokens that a program looks at together; lanes: programs, and blocks of each
    rank's tokens, at most"""

    transport: str = "push"
    block: int = 32
    lanes: int = 16
    num_warps: int = 4

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        if self.transport != "push":
            raise ConfigError(f"moe_route: transport={self.transport!r}; it must be 'push'")
        for name in ("block", "num_warps"):
            if (value := getattr(self, name)) < 1 or value & (value - 1):
                raise ConfigError(f"moe_route: {name}={value}; it must be a power of two")
        if not 1 <= self.lanes < target.num_sms:
            raise ConfigError(
                f"moe_route: lanes={self.lanes}; programs that wait for peers must all be resident,"
                f" beside one of another kernel: {target} takes 1 to {target.num_sms - 1}"
            )

    def tokens(self, problem: Problem) -> route.Tokens:
        blocks = blocks_of(problem.rows, self.block, self.lanes)
        return route.Tokens(problem.m, problem.rows, *blocks, problem.n, problem.max_tiles)

    def cut(self, problem: Problem) -> route.Cut:
        powers = map(_lanes.power_of_two, (problem.n, problem.num_ranks, problem.top_k))
        experts, sources, width = powers
        return route.Cut(
            self.block, max(2, experts), max(2, sources), problem.top_k, max(2, width),
            problem.tile_m, problem.renormalise,
        )  # fmt: skip

    def grid(self, problem: Problem) -> int:
        """Programs that have at least a block of tokens."""
        return max(1, min(self.lanes, problem.num_ranks * self.tokens(problem).blocks))


def blocks_of(rows: int, step: int, lanes: int) -> tuple[int, int]:
    """How many blocks `rows` tokens have, for so many programs, and of how many tokens each: some
    times `step`."""
    steps = ceil(rows / step)
    length = max(1, ceil(steps / lanes))
    return ceil(steps / length), length * step


def tokens_together(top_k: int) -> int:
    """A power of two: of tokens with so many choices, at most."""
    return max(1, MOST_TOGETHER // max(2, _lanes.power_of_two(top_k)))


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    block = max(1, THREADS * THREAD_LOGITS // _lanes.power_of_two(problem.n))
    block = min(block, tokens_together(problem.top_k), max(1, _lanes.power_of_two(problem.rows)))
    if target.backend == "emu":
        yield Config(block=min(block, 32), lanes=2)
        return
    num_warps = THREADS // target.warp_size
    yield Config(block=block, lanes=min(64, target.num_sms - 1), num_warps=num_warps)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The program


class Heard(NamedTuple):
    """The slot's arrays: ids, weights [m, top_k] of all tokens, counted [blocks, experts]."""

    ids: Any
    weights: Any
    counted: Any
    routed: Any


@triton.jit
def _choose_block(world, logits, ids, weights, heard, block, rank, e, tokens, cut):
    """Own block -> experts and weights, here and on every rank; and how many each expert has."""
    own_first, own_end = mapping.part_of(tokens.m, rank, tokens.rows)
    own = own_end - own_first
    k = tl.arange(0, cut.width)
    expert = tl.arange(0, cut.experts)
    counts = tl.zeros((cut.experts,), tl.int32)
    first = block * tokens.length
    for at in range(first, tl.minimum(first + tokens.length, own), cut.block):
        row = at + tl.arange(0, cut.block)
        chosen = route.choose(logits, row, own, tokens, cut)
        place = row[:, None] * cut.top_k + k[None, :]
        mask = (row < own)[:, None] & (k < cut.top_k)[None, :]
        tl.store(ids + place, chosen.ids, mask=mask)
        tl.store(weights + place, chosen.weights, mask=mask)
        there = rank * tokens.rows * cut.top_k + place
        for hop in range(1, world.num_ranks + 1):
            to = (rank + hop) % world.num_ranks
            # weft: equivalent-mutant peer+1 of at: every rank is given the same, in another order
            wl.put(world, heard.ids + there, chosen.ids, to=to, mask=mask)
            # weft: equivalent-mutant peer+1 of at: as above
            wl.put(world, heard.weights + there, chosen.weights, to=to, mask=mask)
        counts += chosen.counts
    index = rank * tokens.blocks + block
    counted = heard.counted + index * tokens.experts + expert
    for hop in range(1, world.num_ranks + 1):
        to = (rank + hop) % world.num_ranks
        # weft: equivalent-mutant peer+1 of at: as above
        wl.put(world, counted, counts, to=to, mask=expert < tokens.experts)
    wl.notify_all(world, heard.routed + index, e, op=wl.SignalOp.SET)


@triton.jit
def moe_route_tables(logits, made, heard, slot, tokens, cut, world):
    """made: Tables, the results; heard: Heard"""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    for block in range(program, tokens.blocks, num_programs):
        _choose_block(
            world, logits, made.ids, made.weights, heard, block, rank, e, tokens, cut
        )  # fmt: skip
    blocks = world.num_ranks * tokens.blocks
    wl.wait(heard.routed, e, blocks, world=world)  # pairs with _choose_block of all ranks
    # The last programs have the fewest blocks.
    share = tl.cdiv(blocks, num_programs)
    first = program * share
    counts = route.count(heard.counted, first, tokens, cut, world.num_ranks)
    if program == num_programs - 1:
        route.store_counts(
            made.counts, counts.by_source, tokens.experts, cut, world.num_ranks
        )  # fmt: skip
        route.cut_tiles(
            counts.by_source, made.tiles, made.turns, made.num_tiles, rank, tokens, cut,
            world.num_ranks,
        )  # fmt: skip
    begin = route.first_of(tl.sum(counts.by_source, axis=0)) + counts.before
    for block in range(first, tl.minimum(first + share, blocks)):
        begin = route.place(
            heard.ids, heard.weights, block, begin, made.token_of, made.weight_of, made.slot_of,
            tokens.m * cut.top_k, tokens, cut,
        )  # fmt: skip
    slots.slot_finish(world, slot, e, num_programs)


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
    if _operations.is_asked(logits):
        rest = (top_k, m, renormalise, tile_m)
        made = _operations.as_operation("moe_route", world, (logits,), *rest, config=config)
        return Routing(Tables(*made), tile_m)
    problem = problem_of(world, logits, top_k, m, renormalise, tile_m)
    config = config or choose(problem, world.target)
    config.check(problem, world.target)
    world.operator_call(
        f"moe_route m={problem.m},n={problem.n} {problem.dtype} top_k={top_k} "
        f"renormalise={renormalise} tile_m={tile_m} {config}"
    )
    made = _empty(problem, logits.shape[0], logits.device)
    if problem.m == 0:
        for one in made[:-2]:
            one.zero_()
        made.num_tiles.zero_()
        torch.arange(problem.max_tiles, dtype=torch.int32, out=made.turns)
        return Routing(made, tile_m)
    slot = world.workspace("moe_route", *_memory(problem, config))
    heard = Heard(slot.ids, slot.weights, slot.counted, slot.routed)
    moe_route_tables[(config.grid(problem),)](
        logits, made, heard, slot.arg, config.tokens(problem), config.cut(problem).as_constexpr(),
        world.arg, num_warps=config.num_warps,
    )  # fmt: skip
    return Routing(made, tile_m)


def _empty(problem: Problem, own: int, device: Any) -> Tables:
    """Results without their values."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return Tables(
        ids=ints(own, problem.top_k),
        weights=torch.empty((own, problem.top_k), device=device),
        token_of=ints(problem.num_slots),
        weight_of=torch.empty(problem.num_slots, device=device),
        slot_of=ints(problem.m, problem.top_k),
        counts=ints(problem.num_ranks, problem.n),
        tiles=ints(5, problem.max_tiles),
        turns=ints(problem.max_tiles),
        num_tiles=ints(1),
    )


def _memory(problem: Problem, config: Config) -> tuple[dict, dict]:
    """The slot's buffers and signals."""
    blocks = problem.num_ranks * config.tokens(problem).blocks
    buffers = {
        "ids": ((problem.m, problem.top_k), torch.int32),
        "weights": ((problem.m, problem.top_k), torch.float32),
        "counted": ((blocks, problem.n), torch.int32),
    }
    return buffers, {"routed": (blocks, torch.int64)}


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
        _lanes.nodes_of(world), top_k, renormalise, tile_m,
    )  # fmt: skip
    first, end = problem.shard(world.rank)
    if own != end - first:
        raise ShapeError(
            f"moe_route: rank {world.rank} of {world.num_ranks} passes logits of {own} tokens, but "
            f"of m={problem.m} it holds {end - first} (torch.chunk); pass m= where ranks differ"
        )
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
    first, end = problem.shard(rank)
    return {"logits": _lanes.random_rows(problem, rank, end - first, seed)}


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> Tables:
    return moe_route(
        inputs["logits"], problem.top_k, world=world, m=problem.m, config=config,
        renormalise=problem.renormalise, tile_m=problem.tile_m,
    ).tables  # fmt: skip


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or choose(problem, target)
    config.check(problem, target)
    word, number = "*i32", "*fp32"
    types = {
        "logits": f"*{DTYPES[problem.dtype].triton}",
        "made": [word, number, word, number, word, word, word, word, word],
        "heard": [word, number, word, "*i64"],
    }
    pointers = {"made": Tables, "heard": Heard}
    yield _records.record(
        moe_route_tables, "moe_route.tables", problem.num_ranks, types,
        tuples={**pointers, "tokens": route.Tokens},
        constants={"cut": config.cut(problem)}, options={"num_warps": config.num_warps},
        aligned=[
            *(f"{name}.{field}" for name, kind in pointers.items() for field in kind._fields),
            *_records.aligned_sizes("tokens", config.tokens(problem)),
        ],
    )  # fmt: skip


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> Tables:
    """A rank's results: their shapes and dtypes, without their values."""
    first, end = problem.shard(rank)
    return _empty(problem, end - first, "meta")


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
    kernels=kernels,
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
