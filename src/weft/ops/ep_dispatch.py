"""Tokens to the ranks of their experts: the way there of expert parallelism.

    x'[slot, :]  =  x of all ranks[token_of[slot], :]        slots: (token, k) of this rank's
                                                             experts, by (expert, source, token)

Experts are split over the ranks as torch.chunk splits them; every rank has some tokens, and for
each of them top_k experts with weights. A rank ends with the rows for its experts, sorted and
padded to nothing: what a grouped product takes (weft.tiles.hooks.table). How many there are is
known on the device alone.

A row travels once to each rank that has any of its token's experts, not once for each expert: with
8 of 256 experts on 4 ranks that is 3.6 rows for each token and not 8. The copies that a rank's
experts need are made there, at the memory's speed, by the pass that also sorts them. Rows lie where
their rank and their number say until then, so nobody has to be told a place.

Plan, `sm_push`: two kernels on each rank, on one slot
    tables   moe_route's plan without the choosing: each rank tells every rank its tokens' choices,
             and how many each expert has; sums of counts are places, so no slot is given out by
             arrival. Choices that are wrong become none, and the last program says so
    rows     in channels: own tokens, some at a time -> `gathered` of each rank that needs them, and
             a word; then for each source, own first, when its channel's word is here: rows -> slots
`ll`: the same, but rows travel with their flag, at twice the bytes, and need no word: what a
rank waits for it knows by the tables
With a handle the tables are there, and the second kernel is all. Before `sm_push` the first one
waits for no credits: a rank that has sent the rows of a call is done with its choices, and all send
a word. A rank that has no row for another sends it no packet.

Signals (SET to the call's epoch e; each is waited for in the call that sets it)
    routed[src * blocks + b]     choices of block b of rank src are here, with their counts. By src
    rows_ready[src * channels + l]  what channel l of rank src has for this rank is here. By src;
                                    not of packets
    slot_free, epoch, ticket     the slot's; the last program of `rows` moves them
Ranks without tokens signal too.

Limits  x, ids and weights are contiguous; `gathered` has room for all tokens of all ranks. What
        exceeds `capacity` is left out and raised on all ranks by a later call, as are choices that
        are no expert or come twice
Source  the design's section 4; DeepEP's dispatch for the idea, docs/decisions/009-hooks.md for the
        tables
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from weft.base.card import Op, Trial
from weft.base.dtypes import DTYPES
from weft.base.errors import ShapeError
from weft.ops import _baselines, _ep
from weft.ops._ep import Config, Dispatched, Handle, candidates
from weft.ops._ep import choose as choose
from weft.ops.moe_route import Tables
from weft.plan import described, operations
from weft.plan.launches import Start
from weft.plan.problems import nodes_of, random_rows
from weft.plan.vectors import PACKET_BYTES, as_words, power_of_two, width_of, words_in_vector
from weft.runtime.world import World
from weft.tiles import choices
from weft.tiles import experts as ep

TABLES = ("ids", "token_of", "weight_of", "slot_of", "counts", "tiles", "turns", "num_tiles")


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[tuple]:
    """All ranks at once: x' and scales, with zeros behind the last slot, then TABLES."""
    made = _ep.reference_tables(problem, inputs)
    found = []
    for one in made:
        tokens = one.token_of.long()
        moved = [_whole(problem, inputs, name)[tokens] for name in _moved(inputs[0])]
        found.append((*moved, *(getattr(one, name) for name in TABLES)))
    return found


def _moved(inputs: Mapping[str, Any]) -> list[str]:
    return [name for name in ("x", "scales") if name in inputs]


def _whole(problem: Problem, inputs: Sequence[Mapping[str, Any]], name: str) -> torch.Tensor:
    """All ranks' rows by token, and behind them one of zeros."""
    first = inputs[0][name]
    whole = first.new_zeros(problem.num_tokens + 1, first.shape[1])
    for rank, one in enumerate(inputs):
        whole[rank * problem.rows :][: len(one[name])] = one[name]
    return whole


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_ep.Problem):
    """m tokens of n elements, of any dtype: they are moved bit by bit. With each go `scale_bytes`
    of scales; `again` and again by the same handle."""

    scale_bytes: int = 0
    again: int = 0

    op = "ep_dispatch"
    dtypes = tuple(DTYPES)

    @property
    def element_bytes(self) -> int:
        return min(8, width_of(self.row_bytes))

    @property
    def packed_bytes(self) -> int:
        return math.gcd(self.row_bytes, self.scale_bytes)


# ---------------------------------------------------------------------------------------------
# The host


def ep_dispatch(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    ids: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    experts: int | None = None,
    *,
    world: World,
    max_tokens: int | None = None,
    capacity: int | None = None,
    tile_m: int = 128,
    handle: Handle | None = None,
    clear: bool = False,
    config: Config | None = None,
) -> Dispatched:
    """Rows of tokens to the ranks that have their experts, sorted by expert. Collective.

        x'[slot] = x of its source rank[its token]     slots by (own expert, source rank, token)

    With `handle` another x goes the ways of an earlier call, without a word about them. x may be
    (rows, scales): then both go, as x', by one launch.

    Shapes  x: [own tokens, n], scales: [own tokens, any number], contiguous; ids, weights: [own
            tokens, top_k]; experts: how many all ranks have, split as torch.chunk does; max_tokens:
            the most that a rank has, by default own: pass it where ranks differ. x': [capacity, n],
            where capacity defaults to what comes if all tokens choose one rank; behind the last
            slot zeros with `clear`, else nothing is written
    Dtypes  x: any, moved bit by bit; ids: int32, -1 for none; weights: float32
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ;
            by a later call, or world.check(): CapacityError, UsageError: choices that are no
            expert or come twice. All ranks raise them
    """
    rows, scales = x if isinstance(x, tuple) else (x, None)
    rest = (experts, world, max_tokens, capacity, tile_m, handle)
    if operations.is_asked(rows, *(() if weights is None else (weights,))):
        rows, ids, weights = operations.plain("ep_dispatch", world, (rows, ids, weights))
        call = partial(_dispatch, rows, scales, ids, weights, *rest, clear=True, config=config)
        return operations.between_graphs("ep_dispatch")(call, rows, scales, weights, world)
    return _dispatch(rows, scales, ids, weights, *rest, clear=clear, config=config)


def _dispatch(
    rows: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor | None,
    weights: torch.Tensor | None, experts: int | None, world: World, max_tokens: int | None,
    capacity: int | None, tile_m: int, handle: Handle | None, *, clear: bool,
    config: Config | None,
) -> Dispatched:  # fmt: skip
    """The call itself, of which torch sees nothing."""
    _ep.check_rows(world, "ep_dispatch", "x", rows)
    if handle is None:
        problem = problem_of(world, rows, ids, weights, experts, max_tokens, capacity, tile_m)
    else:
        problem = _problem_again(rows, handle, ids, weights, experts, max_tokens, capacity)
    problem = replace(problem, scale_bytes=_scale_bytes(world, rows, scales))
    kind = "" if handle is None else "again"
    config = _ep.begin(world, problem, config, f"{kind} {problem.scale_bytes}")
    slot = _slot_of(world, problem, config) if problem.m else None
    if handle is None:
        made = Tables.empty(problem, len(rows), rows.device)._replace(weights=weights)
        handle = Handle(made, problem)
        if slot is not None:
            _tables(world, problem, config, slot, ids, made, _error_word(world, problem)).run()
    sent = [rows] if scales is None else [rows, scales]
    got = [one.new_empty(problem.capacity, one.shape[1]) for one in sent]
    if slot is not None:
        _rows(world, problem, config, slot, sent, got, handle.tables, clear).run()
    elif clear:
        for one in got:
            one.zero_()
    return Dispatched(got[0] if scales is None else tuple(got), handle._replace(problem=problem))


def _scale_bytes(world: World, rows: Any, scales: Any) -> int:
    """Of each row's scales. Raises  ShapeError: not as many as rows"""
    if scales is None:
        return 0
    _ep.check_rows(world, "ep_dispatch", "scales", scales)
    if scales.shape[0] != rows.shape[0] or not scales.shape[1]:
        raise ShapeError(
            f"ep_dispatch: scales has shape {tuple(scales.shape)} but x has {rows.shape[0]} "
            "tokens; each has as many scales as the others, and one at least"
        )
    return scales.shape[1] * scales.element_size()


# Programs of the first kernel, each with an SM for itself, and blocks of each rank's tokens,
# at most: all programs add up the counts of all blocks.
MOST_PROGRAMS = 64


def _blocks(problem: Problem, config: Config) -> choices.Blocks:
    columns, programs = problem.own_experts + problem.num_ranks, min(config.channels, MOST_PROGRAMS)
    return choices.Blocks.of(problem, columns, config.batch, programs)


def _slot_of(world: Any, problem: Problem, config: Config) -> Any:
    """Arrays of both kernels."""
    blocks = _blocks(problem, config)
    buffers, signals = (dict(one) for one in blocks.memory)
    buffers["wrong"] = ((blocks.count,), torch.int32)
    signals["rows_ready"] = (problem.num_ranks * config.grid(problem), torch.int64)
    for name, size in (("gathered", problem.row_bytes), ("scales", problem.scale_bytes)):
        if config.by_packets:
            signals[name] = (config.packets(problem, size), torch.int64)
        else:
            buffers[name] = ((max(8, problem.num_tokens * size),), torch.uint8)
    return world.workspace(f"ep_dispatch.{config.transport}", buffers, signals)


def _tables(
    world: Any, problem: Problem, config: Config, slot: Any, ids: Any, made: Tables, errors: Any
) -> Start:
    """The launch that fills a handle's tables."""
    blocks, heard = _blocks(problem, config), choices.Heard.of(slot)
    given = (ids, made, heard, errors, slot.arg, blocks.tokens, blocks.cut)
    return Start(
        choices.ep_dispatch_tables, (min(config.channels, MOST_PROGRAMS, blocks.count), 1, 1),
        (*given, _ep.split_of(problem, len(ids)), world.arg, config.by_packets),
        {"num_warps": config.num_warps},
    )  # fmt: skip


def _rows(
    world: Any, problem: Problem, config: Config, slot: Any, sent: Sequence[Any],
    got: Sequence[Any], tables: Tables, clear: bool,
) -> Start:  # fmt: skip
    """The launch that moves rows, and scales with them."""
    moved, tiles = [None, None], [None, None]
    sizes = (problem.row_bytes, problem.scale_bytes)
    for i, (x, out) in enumerate(zip(sent, got, strict=True)):
        gathered = slot.scales if i else slot.gathered
        if config.by_packets:
            width = PACKET_BYTES
            x = x.clone() if width_of(width, x) < width else x
            moved[i] = ep.Rows(*as_words(width, x, out), gathered, sizes[i] // width)
        else:
            width = width_of(sizes[i], x, out)
            words = as_words(width, x, out, gathered)
            moved[i] = ep.Rows(*words, sizes[i] // min(width, 8))
        tiles[i] = _tile(problem, config, i, width).as_constexpr()
    return Start(
        ep.ep_dispatch_rows, (config.grid(problem), 1, 1),
        (*moved, tables.ids, tables.slot_of, tables.token_of, slot.rows_ready, slot.arg,
         _ep.split_of(problem, len(sent[0])), *tiles, world.arg, config.by_packets, clear),
        config.options(world.target),
    )  # fmt: skip


def _tile(problem: Problem, config: Config, index: int, width: int) -> ep.Extents:
    """Of rows (0), or scales (1), which may be few."""
    tile = config.extents(problem, words_in_vector(width))
    if index == 0:
        return tile
    count = problem.scale_bytes // min(width, 8)
    return tile._replace(block=max(tile.vec, min(tile.block, power_of_two(count))))


def problem_of(
    world: World, x: Any, ids: Any, weights: Any, experts: Any, max_tokens: Any, capacity: Any,
    tile_m: int,
) -> Problem:  # fmt: skip
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    missing = [
        n for n, v in (("ids", ids), ("weights", weights), ("experts", experts)) if v is None
    ]
    if missing:
        raise ShapeError(f"ep_dispatch: {', '.join(missing)} missing; pass them, or a handle")
    _ep.check_choices(world, "ep_dispatch", x, ids, weights)
    own, n = x.shape
    rows = own if max_tokens is None else max_tokens
    if own > rows:
        raise ShapeError(
            f"ep_dispatch: rank {world.rank} passes {own} tokens but max_tokens={rows}; it must be "
            "the most that any rank has, and the same on all ranks"
        )
    return Problem(
        rows * world.num_ranks, n, world.num_ranks, str(x.dtype), nodes_of(world), experts,
        ids.shape[1], tile_m, -1 if capacity is None else capacity,
    )  # fmt: skip


def _problem_again(x: Any, handle: Handle, *given: Any) -> Problem:
    """Raises  ShapeError: not as many tokens as the handle has; what the handle says is said too"""
    if any(one is not None for one in given):
        raise ShapeError(
            "ep_dispatch: with a handle, ids, weights, experts, max_tokens and capacity are its; "
            "leave them out"
        )
    own = handle.tables.ids.shape[0]
    if x.shape[0] != own:
        raise ShapeError(f"ep_dispatch: x has {x.shape[0]} tokens but the handle is of {own}")
    return replace(handle.problem, n=x.shape[1], dtype=str(x.dtype))


def _error_word(world: Any, problem: Problem) -> torch.Tensor:
    """Where the kernel says what is wrong with a problem's choices."""
    # All that a message says.
    sizes = (problem.capacity, problem.most_slots, problem.experts, problem.top_k)
    key = ("ep_dispatch.errors", *sizes)
    word = world.calls.get(key)
    if word is None:
        word = world.calls[key] = world.error_word(partial(choices.explain, problem))
    return word


# ---------------------------------------------------------------------------------------------
# The card


def make_problem(
    num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Problem:
    made = _ep.make_problem(Problem, num_ranks, shape, dtype, nodes)
    return replace(made, again=shape.get("again", 0), scale_bytes=4 * shape.get("scales", 0))


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random tokens and choices on the CPU: the same for one seed on every machine."""
    first, end = problem.shard(rank)
    inputs = {"x": random_rows(problem, rank, end - first, seed)}
    if problem.scale_bytes:
        size = (end - first, problem.scale_bytes // 4)
        generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank + 2)
        inputs["scales"] = torch.rand(size, generator=generator)
    return {**inputs, **_ep.make_choices(problem, rank, seed)}


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> tuple:
    rows = tuple(inputs[name] for name in _moved(inputs))
    x = rows if len(rows) > 1 else rows[0]
    got, handle = ep_dispatch(
        x, inputs["ids"], inputs["weights"], problem.experts, world=world,
        max_tokens=problem.rows, capacity=problem.capacity, tile_m=problem.tile_m, clear=True,
        config=config,
    )  # fmt: skip
    for _ in range(problem.again):
        got, _ = ep_dispatch(x, world=world, handle=handle, clear=True, config=config)
    moved = got if isinstance(got, tuple) else (got,)
    return *moved, *(getattr(handle.tables, name) for name in TABLES)


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> tuple:
    """A rank's results: their shapes and dtypes, without their values."""
    first, end = problem.shard(rank)
    shape = (problem.capacity, problem.n)
    made = Tables.empty(problem, end - first, "meta")
    moved = [torch.empty(shape, dtype=problem.torch_dtype, device="meta")]
    if problem.scale_bytes:
        moved.append(torch.empty(problem.capacity, problem.scale_bytes // 4, device="meta"))
    return *moved, *(getattr(made, name) for name in TABLES)


op = Op(
    name="ep_dispatch",
    summary="x'[slot] = rows of all ranks' tokens for this rank's experts, sorted by expert",
    problem=Problem,
    config=Config,
    make_problem=make_problem,
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=described.kernels_of(run, make_inputs, candidates),
    trials=(
        Trial((3,), {"m": 14, "n": 40, "experts": 5, "top_k": 2}, calls=(0, 1, 2, 0)),
        Trial((2, 1), {"m": 14, "n": 40, "experts": 5, "top_k": 2}, calls=(0, 1, 2, 0)),
        # Rows alone: only credits keep these apart.
        Trial((3,), {"m": 14, "n": 20, "experts": 5, "top_k": 2, "again": 2}, calls=(0, 2)),
    ),
    dtypes=Problem.dtypes,
    baselines=_baselines.EP_DISPATCH,
    fake=fake,
    backward=("ep_combine",),
    **_ep.CARD,
)
