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

Plan: two kernels on each rank, on one slot
    tables   moe_route's plan without the choosing: each rank tells every rank its tokens' choices,
             and how many each expert has; sums of counts are places, so no slot is given out by
             arrival. Choices that are wrong become none, and the last program says so
    rows     by channel: own tokens, some at a time -> `gathered` of each rank that needs them, and
             a word; then for each source, own first, when its word is here: rows -> slots
With a handle, or a router's tables of own experts, these are there, and the second kernel is all.
transport="relay", over several nodes: a row crosses to each node that has any of its token's
experts once, to own rank's partner there (weft.tiles.nodes), which stores it on the other ranks of
its node that have some. Who has is said by the tokens' choices, which cross ahead of them.
The first one waits for no credits: a rank that has sent the rows of a call is done with its
choices, and all send a word.

Signals (SET to the call's epoch e; each is waited for in the call that sets it)
    routed[src * blocks + b]     choices of block b of rank src are here, with their counts. By src
    rows_ready[src * channels + c]  what channel c of rank src has for this rank is here. By src,
                                 or, relayed, by the partner of src on this node
    slot_free, epoch, ticket     the slot's; the last program of `rows` moves them
Ranks without tokens signal too.

Limits  x, ids and weights are contiguous; `gathered` has room for all tokens of all ranks. What
        exceeds `capacity` is left out and raised on all ranks by a later call, as are choices that
        are no expert or come twice
Source  the design's section 4; DeepEP's dispatch for the idea, docs/decisions/009-hooks.md for the
        tables
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from weft.base.card import UNFUSED, Op, Trial
from weft.base.dtypes import DTYPES
from weft.base.errors import DtypeError, ShapeError
from weft.base.providers import provider
from weft.compiler import layouts
from weft.compiler.experts import Routing, Tables
from weft.ops import _baselines
from weft.plan import by_libraries, expert_parallel, operations
from weft.plan.call_cache import by_layout, find_call, other_kind
from weft.plan.choices import given_or_chosen
from weft.plan.expert_parallel import RELAY, Config, Handle
from weft.plan.expert_parallel import candidates as candidates
from weft.plan.kept_launches import KeptLaunches
from weft.plan.launches import Start
from weft.plan.memory import like
from weft.plan.problems import nodes_of, random_rows
from weft.plan.routing import random_choices, tables_like, tables_of
from weft.plan.vectors import as_words, power_of_two, width_of, words_in_vector
from weft.runtime.world import World
from weft.tiles import choices
from weft.tiles import experts as ep

TABLES = ("ids", "token_of", "weight_of", "slot_of", "counts", "tiles", "turns", "num_tiles")
FORMS = {"x": "tokens n", "scales": "tokens scales", "ids": "tokens top_k",
         "weights": "tokens top_k"}  # fmt: skip
# Programs of the first kernel, each with an SM for itself, and blocks of each rank's tokens,
# at most: all programs add up the counts of all blocks.
MOST_PROGRAMS = 64


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[tuple]:
    """All ranks at once: x' and scales, with zeros behind the last slot, then TABLES."""
    whole = []
    for name in (one for one in ("x", "scales") if one in inputs[0]):
        first = inputs[0][name]
        # By token, and behind them a row of zeros.
        rows = first.new_zeros(problem.num_tokens + 1, first.shape[1])
        for rank, one in enumerate(inputs):
            rows[rank * problem.rows :][: len(one[name])] = one[name]
        whole.append(rows)
    found = []
    for rank in range(problem.num_ranks):
        made = tables_of(problem, rank, inputs)
        moved = [rows[made.token_of.long()] for rows in whole]
        found.append((*moved, *(getattr(made, name) for name in TABLES)))
    return found


@dataclass(frozen=True)
class Problem(expert_parallel.Problem):
    """m tokens of n elements, of any dtype: they are moved bit by bit. With each go `scale_bytes`
    of scales; `again` and again by the same handle."""

    scale_bytes: int = 0
    again: int = 0

    op = "ep_dispatch"
    dtypes = tuple(DTYPES)


class Dispatched(NamedTuple):
    """x: [capacity, n] rows by slot; (rows, scales) of such. Behind the last slot nothing is
    written."""

    x: Any
    handle: Handle


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
    handle: Handle | Routing | None = None,
    clear: bool = False,
    by_choice: bool = False,
    config: Config | None = None,
) -> Dispatched:
    """Rows of tokens to the ranks that have their experts, sorted by expert. Collective.

        x'[slot] = x of its source rank[its token]     slots by (own expert, source rank, token)

    With `handle` another x goes the ways of an earlier call, without a word about them; or those of
    the Routing of moe_route with split_experts, by which all ranks know all choices. x may be
    (rows, scales): then both go, as x', by one launch. by_choice: a token's gradients are added up
    in the order of its choices, as ep_combine does it.

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
    if isinstance(handle, Routing):
        handle = expert_parallel.handle_of(handle, Problem, world)
    elif handle is not None and not isinstance(handle, Handle):
        raise other_kind("ep_dispatch", "handle", handle, "what ep_dispatch or moe_route returned")
    rest = (experts, world, max_tokens, capacity, tile_m, handle)
    if operations.is_asked(rows, *(() if weights is None else (weights,))):
        rows, ids, weights = operations.plain("ep_dispatch", world, (rows, ids, weights))
        call = partial(_dispatch, rows, scales, ids, weights, *rest, clear=True, config=config)
        return _with_gradients(call, rows, scales, weights, world, by_choice)
    return _dispatch(rows, scales, ids, weights, *rest, clear=clear, config=config)


def _dispatch(
    rows: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor | None,
    weights: torch.Tensor | None, experts: int | None, world: World, max_tokens: int | None,
    capacity: int | None, tile_m: int, handle: Handle | None, *, clear: bool,
    config: Config | None,
) -> Dispatched:  # fmt: skip
    """The call itself, of which torch sees nothing."""
    there = None if handle is None else (handle.problem, handle.tables.ids.shape[0])
    rest = (experts, max_tokens, capacity, tile_m, there, clear, config)
    call = find_call(world, "ep_dispatch", (rows, scales, ids, weights), rest, _Call, by_layout)
    return call(rows, scales, ids, weights, handle)


class _Call:
    """What dispatches of tensors like these share on one rank; `there` are a handle's problem and
    how many own tokens it is of."""

    tensors = ""

    def __init__(
        self, world: World, x: Any, scales: Any, ids: Any, weights: Any, experts: int | None,
        max_tokens: int | None, capacity: int | None, tile_m: int,
        there: tuple[Any, int] | None, clear: bool, config: Config | None,
    ) -> None:  # fmt: skip
        given = {"ids": ids, "weights": weights, "experts": experts}
        problem = problem_of(world, x, scales, given, max_tokens, capacity, tile_m, there)
        config = given_or_chosen(world, problem, config)
        self.world, self.problem, self.config = world, problem, config
        self.own, self.clear, self.is_again = len(x), clear, there is not None
        kind = f"{'again' if self.is_again else ''} {problem.scale_bytes}"
        self.name = expert_parallel.name_of(problem, config, kind)
        self._likes = [
            like((problem.capacity, one.shape[1]), one.dtype, world.device)
            for one in (x, scales) if one is not None
        ]  # fmt: skip
        self._tables_like = tables_like(problem, self.own, world.device)
        self._kept = None
        if problem.m:
            self._kept = KeptLaunches(world, _slots_of(world, problem, config))
        # By all that a message says, where the kernel says what is wrong with choices.
        sizes = (problem.capacity, problem.most_slots, problem.experts, problem.top_k)
        self._errors_key = ("ep_dispatch.errors", *sizes)

    def __call__(
        self, rows: Any, scales: Any, ids: Any, weights: Any, handle: Handle | None
    ) -> Dispatched:
        """Queue the call. Collective."""
        world, problem = self.world, self.problem
        world.operator_call(self.name, self.tensors)
        if handle is None:
            if self._kept is None:
                made = Tables.empty(problem, self.own, world.device)
            else:
                made = Tables(*map(torch.empty_like, self._tables_like))
            handle = Handle(made._replace(weights=weights), problem)
        tables = handle.tables
        sent = [rows] if scales is None else [rows, scales]
        got = [*map(torch.empty_like, self._likes)]
        if self._kept is not None:
            named, errors = [*sent, *got, *tables], None
            if not self.is_again:
                # Asked for anew: the word is forgotten with calls that were used long ago.
                errors = world.calls.get(self._errors_key)
                if errors is None:
                    errors = world.error_word(partial(choices.explain, problem))
                    world.calls[self._errors_key] = errors
                named += [ids, errors]
            self._kept.run(named, partial(self._starts, ids, errors, sent, got, tables))
            if self.config.transport == UNFUSED:
                for one, out in zip(sent, got, strict=True):
                    by_libraries.rows_of_slots(world, problem, one, out, tables)
        elif self.clear:
            for one in got:
                one.zero_()
        return Dispatched(
            got[0] if scales is None else tuple(got), handle._replace(problem=problem)
        )

    def _starts(
        self, ids: Any, errors: Any, sent: Sequence[Any], got: Sequence[Any], tables: Tables,
        slot: Any,
    ) -> Iterator[Start]:  # fmt: skip
        world, problem, config, clear = self.world, self.problem, self.config, self.clear
        if not self.is_again:
            yield _tables(world, problem, config, slot, ids, tables, errors)
        if config.transport == UNFUSED:
            # Without columns, the launch behind that of the tables gives the slot back.
            sent, got = ([one[0][:, :0]] for one in (sent, got))
            problem, clear = replace(problem, n=0, scale_bytes=0), False
        yield _rows(world, problem, config, slot, sent, got, tables, clear)


def _blocks(problem: Problem, config: Config) -> choices.Blocks:
    columns, programs = problem.own_experts + problem.num_ranks, min(config.channels, MOST_PROGRAMS)
    return choices.Blocks.of(problem, columns, config.batch, programs)


def _slots_of(world: Any, problem: Problem, config: Config) -> Any:
    """Slots with the arrays of both kernels."""
    blocks = _blocks(problem, config)
    gathered, scales = (problem.num_tokens * x for x in (problem.row_bytes, problem.scale_bytes))
    sizes = {"gathered": gathered, "scales": scales}
    if config.transport == RELAY:  # where choices of rows that are relayed come
        sizes["chosen"] = 4 * problem.num_tokens * problem.top_k
    arrays, words = expert_parallel.memory_of(problem, config, "rows_ready", **sizes)
    buffers, signals = blocks.memory
    buffers = {**buffers, "wrong": ((blocks.count,), torch.int32)}
    return world.asked("ep_dispatch", buffers, words | signals, shared=arrays)


def _tables(
    world: Any, problem: Problem, config: Config, slot: Any, ids: Any, made: Any, errors: Any
) -> Start:
    """The launch that fills a handle's tables."""
    blocks, heard = _blocks(problem, config), choices.Heard.of(slot)
    return Start(
        choices.ep_dispatch_tables, (min(config.channels, MOST_PROGRAMS, blocks.count), 1, 1),
        (ids, made, heard, errors, slot.arg, blocks.tokens, blocks.cut, problem.split(len(ids)),
         world.arg),
        {"num_warps": config.num_warps},
    )  # fmt: skip


def _rows(
    world: Any, problem: Problem, config: Config, slot: Any, sent: Sequence[Any],
    got: Sequence[Any], tables: Tables, clear: bool,
) -> Start:  # fmt: skip
    """The launch that moves rows, and scales with them."""
    moved, tiles = [None, None], [None, None]
    arrays = ((slot.gathered, problem.row_bytes), (slot.scales, problem.scale_bytes))
    for i, (x, out, (gathered, size)) in enumerate(zip(sent, got, arrays)):
        width = width_of(size, x, out)
        words = as_words(width, x, out, gathered)
        moved[i] = ep.Rows(*words, count := size // min(width, 8))
        tile = config.extents(problem, words_in_vector(width))
        if i:  # scales may be few
            tile = tile._replace(block=max(tile.vec, min(tile.block, power_of_two(count))))
        tiles[i] = tile.as_constexpr()
    chosen = slot.chosen.view(torch.int32) if config.transport == RELAY else None
    return Start(
        ep.ep_dispatch_rows, (config.grid(problem), 1, 1),
        (*moved, tables.ids, chosen, tables.slot_of, tables.token_of, slot.rows_ready, slot.arg,
         problem.split(len(sent[0])), *tiles, world.arg, clear, config.num_nodes(problem)),
        config.options(world.target),
    )  # fmt: skip


def problem_of(
    world: World, x: Any, scales: Any, given: Mapping[str, Any], max_tokens: int | None,
    capacity: int | None, tile_m: int, there: tuple[Any, int] | None,
) -> Problem:  # fmt: skip
    """The problem that this rank's tensors are a part of; `given`: ids, weights, experts; `there`:
    a handle's problem, and how many own tokens it is of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    missing = [name for name, one in given.items() if one is None]
    if there is None and missing:
        raise ShapeError(f"ep_dispatch: {', '.join(missing)} missing; pass them, or a handle")
    if there is not None and (len(missing), max_tokens, capacity) != (3, None, None):
        raise ShapeError(
            "ep_dispatch: with a handle, ids, weights, experts, max_tokens and capacity are its; "
            "leave them out"
        )
    tensors = {"x": x, "scales": scales, "ids": given["ids"], "weights": given["weights"]}
    dtypes = {"ids": torch.int32, "weights": torch.float32}
    if scales is not None:
        dtypes["scales"] = scales.dtype
    sizes = layouts.bind_sizes("ep_dispatch", world, tensors, FORMS, dtypes)
    if not sizes.get("scales", 1):
        raise ShapeError("ep_dispatch: scales has no columns; each token has one scale at least")
    own, n = x.shape
    scale_bytes = 0 if scales is None else sizes["scales"] * scales.element_size()
    if there is not None:
        problem, tokens = there
        if own != tokens:
            raise ShapeError(f"ep_dispatch: x has {own} tokens but the handle is of {tokens}")
        return replace(problem, n=n, dtype=str(x.dtype), scale_bytes=scale_bytes)
    rows = own if max_tokens is None else max_tokens
    if own > rows:
        raise ShapeError(
            f"ep_dispatch: rank {world.rank} passes {own} tokens but max_tokens={rows}; it must be "
            "the most that any rank has, and the same on all ranks"
        )
    return Problem(
        rows * world.num_ranks, n, world.num_ranks, str(x.dtype), nodes_of(world),
        given["experts"], sizes["top_k"], tile_m, -1 if capacity is None else capacity, scale_bytes,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Gradients
#
#     x' = ep_dispatch(x)    dx = ep_combine(dx') without weights
#
# Weights travel to the experts' ranks with the tokens, so their gradients come back as rows do: a
# slot's at its choice's column. Rows behind the last slot are zeros here: they are in the sums of
# whoever multiplies all of them. The handle is no tensor: torch.compile runs this between graphs.


@torch.compiler.disable
def _with_gradients(
    call: Callable[[], Dispatched], rows: Any, scales: Any, weights: Any, world: Any,
    by_choice: bool,
) -> Dispatched:  # fmt: skip
    """What `call()` gives, with zeros behind the last slot."""
    if not operations.is_differentiated(rows, weights):
        with operations.without_autocast():
            return call()
    if scales is not None or rows.dtype.itemsize == 1:
        raise DtypeError(
            f"ep_dispatch: {rows.dtype} rows with scales have no gradient; call under "
            "torch.no_grad(), or send rows in bfloat16 where they are trained"
        )
    kept: list[Dispatched] = []
    x, weight_of, own = _Gradient.apply(rows, weights, call, world, kept, by_choice)
    (made,) = kept
    if weights is None:  # gradients of the handle's go the way by which it was made
        return Dispatched(x, made.handle)
    tables = made.handle.tables._replace(weight_of=weight_of, weights=own)
    return Dispatched(x, made.handle._replace(tables=tables))


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Any, weights: Any, call: Any, world: Any, kept: list, by_choice: bool
    ) -> tuple:
        with operations.without_autocast():
            made = call()
        kept.append(made)
        ctx.handle, ctx.world, ctx.is_weighted = made.handle, world, weights is not None
        ctx.by_choice = by_choice
        if weights is None:
            return made.x, None, None
        # Other tensors than the handle's, which has no gradient.
        tables = made.handle.tables
        return made.x, tables.weight_of.clone(), tables.weights.clone()

    @staticmethod
    def backward(ctx: Any, dx: Any, d_weight_of: Any, d_own: Any) -> tuple:  # type: ignore[override]
        ep_combine = provider("collectives").ep_combine

        d_rows = d_weights = None
        if ctx.needs_input_grad[0]:
            d_rows = ep_combine(
                dx.contiguous(), ctx.handle, world=ctx.world, weighted=False,
                by_choice=ctx.by_choice,
            )  # fmt: skip
        if ctx.is_weighted and ctx.needs_input_grad[1]:
            slots = _by_choice(ctx.handle.tables.slot_of, d_weight_of)
            d_weights = ep_combine(slots, ctx.handle, world=ctx.world, weighted=False) + d_own
        return d_rows, d_weights, None, None, None, None


def _by_choice(slot_of: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[slots, top_k]: a slot's value in the column of the choice that it is, zeros elsewhere."""
    top_k, slots = slot_of.shape[1], values.shape[0]
    choice = torch.arange(top_k, device=values.device).expand_as(slot_of)
    # Choices of other ranks' experts go behind the last, as do those that there was no room for.
    place = torch.where(slot_of < 0, slots, slot_of).clamp(max=slots).long()
    column = torch.zeros(slots + 1, dtype=torch.int64, device=values.device)
    column = column.scatter(0, place.flatten(), choice.flatten())[:slots]
    return torch.nn.functional.one_hot(column, top_k).to(values.dtype) * values[:, None]


# ---------------------------------------------------------------------------------------------
# The card


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random tokens and choices on the CPU: the same for one seed on every machine."""
    own = problem.own_tokens(rank)
    inputs = {"x": random_rows(problem, rank, own, seed)}
    if problem.scale_bytes:
        generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank + 2)
        inputs["scales"] = torch.rand((own, problem.scale_bytes // 4), generator=generator)
    return {**inputs, **random_choices(problem, rank, seed)}


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> tuple:
    x = (inputs["x"], inputs["scales"]) if "scales" in inputs else inputs["x"]
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
    made = Tables.empty(problem, problem.own_tokens(rank), "meta")
    shape, dtype = (problem.capacity, problem.n), problem.torch_dtype
    moved = [torch.empty(shape, dtype=dtype, device="meta")]
    if problem.scale_bytes:
        moved.append(torch.empty(problem.capacity, problem.scale_bytes // 4, device="meta"))
    return *moved, *(getattr(made, name) for name in TABLES)


SIZES = {"m": 14, "n": 40, "experts": 5, "top_k": 2}

op = Op(
    name="ep_dispatch",
    summary="x'[slot] = rows of all ranks' tokens for this rank's experts, sorted by expert",
    reference=reference,
    trials=(
        *(Trial(nodes, SIZES, calls=(0, 1, 2, 0)) for nodes in ((3,), (2, 1))),
        # Rows alone: only credits keep these apart.
        *(
            Trial(nodes, {**SIZES, "n": 20, "again": 2}, transport, calls=(0, 2))
            for nodes, transport in (((3,), ""), ((2, 1), RELAY))
        ),
    ),
    dtypes=Problem.dtypes,
    baselines=_baselines.EP_DISPATCH,
    fake=fake,
    backward=("ep_combine",),
    **expert_parallel.card(Problem, run, make_inputs, make_inputs),
)
