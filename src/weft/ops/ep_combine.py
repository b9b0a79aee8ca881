"""Results of experts back to their tokens' ranks: the way back of expert parallelism.

    out[own token, :]  =  sum over its experts of  weight * y[slot of (token, expert), :]

Every rank has the results of its own experts, by slot, as ep_dispatch has sorted their tokens. A
token's experts on one rank are added up there, in fp32 and weighted, and one row goes back for each
rank that has any, rounded once; the token's rank adds these up in fp32. Experts are split in their
order, so both sums are in the order of experts, whatever comes first: results are the same bits in
every run.

Plan: one kernel on each rank, in channels (weft.tiles.experts)
    add      slots of each rank's tokens, rank + 1's first and own last -> that rank's `shares`,
             some tokens at a time; and a word
    collect  when all ranks' words of this channel are here: own tokens' shares -> out
A share lies where its rank and its token's number say.

transport="relay", over several nodes: shares of another node's tokens go to the partner of their
token's rank on this node, which adds up those of all its ranks in fp32, in their order, and sends
one sum, rounded once more. It stands at the partner's place among shares. Same bits in every run,
but not those of sm_push.

by_choice: nothing is added up on the way, nor relayed. A share is one choice's row as it is, and
lies where its token's and its choice's numbers say; `collect` weighs and adds up in the order of
choices. So bits are those of one rank that has all experts, whatever the number of ranks.

Signals (SET to the call's epoch e; each is waited for in the call that sets it)
    shares_ready[src * channels + l]  what channel l of rank src has for this rank is here. By src
    relayed_ready[part * channels + l]  relayed: the share of a rank of this node, by that rank;
                                   relay.Groups says which part is whose
    slot_free, epoch, ticket       the slot's; the last program moves them
Ranks without tokens signal too.

Limits  y is contiguous; `shares` has room for a row of each rank for each own token, or by_choice
        of each choice
Source  the design's section 4; DeepEP's combine for the idea
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from weft.base.card import UNFUSED, Op, Trial
from weft.base.errors import ShapeError
from weft.base.providers import provider
from weft.compiler import layouts
from weft.compiler.experts import Routing, Tables
from weft.ops import _baselines
from weft.ops.ep_dispatch import Problem as Dispatch
from weft.plan import by_libraries, expert_parallel, operations
from weft.plan.call_cache import by_layout, check_apart, check_out, find_call, other_kind
from weft.plan.choices import given_or_chosen
from weft.plan.expert_parallel import Config, Handle
from weft.plan.expert_parallel import candidates as candidates
from weft.plan.kept_launches import KeptLaunches
from weft.plan.launches import Start
from weft.plan.memory import like
from weft.plan.problems import random_rows
from weft.plan.routing import random_tables
from weft.plan.vectors import elements_in_vector, width_of
from weft.runtime.world import World
from weft.tiles import experts, relay


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once: shares of each rank in the order of its slots, then of ranks, in fp32."""
    if problem.by_choice:
        return [_in_order(problem, rank, inputs) for rank in range(problem.num_ranks)]
    sums = torch.zeros(problem.num_tokens, problem.n)
    for one in inputs:
        share, first = torch.zeros(problem.num_tokens, problem.n), 0
        for size in one["counts"].sum(0).tolist():  # an expert has a token once
            rows = slice(first, first + size)
            value = one["y"][rows].float()
            if problem.weighted:
                value = value * one["weight_of"][rows, None]
            share[one["token_of"][rows].long()] += value
            first += size
        sums += share.to(problem.torch_dtype).float()
    outs = [sums[r * problem.rows :][: len(one["ids"])] for r, one in enumerate(inputs)]
    return [out.to(problem.torch_dtype) for out in outs]


def _in_order(problem: Problem, rank: int, inputs: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Sums of one rank's tokens over their choices, in the order of these, in fp32."""
    ids, weights = inputs[rank]["ids"], inputs[rank]["weights"]
    mine = slice(rank * problem.rows, rank * problem.rows + len(ids))
    rows = torch.zeros(*ids.shape, problem.n)
    for one in inputs:
        slots = one["slot_of"][mine]
        here = (slots >= 0) & (slots < problem.capacity)
        rows[here] = one["y"][slots[here].long()].float()
    if problem.weighted:
        rows = rows * weights.where(ids >= 0, 0.0)[..., None]
    return sum(rows[:, 1:].unbind(1), rows[:, 0]).to(problem.torch_dtype)


@dataclass(frozen=True)
class Problem(expert_parallel.Problem):
    """Results of n elements for the tokens of a dispatch; sums of them, or of them `weighted`;
    made of what ranks have added up, or `by_choice`."""

    weighted: bool = True
    by_choice: bool = False

    op, sums = "ep_combine", True

    @property
    def can_relay(self) -> bool:
        """Rows of choices are no sums, so nothing is gained by another rank's hands."""
        return super().can_relay and not self.by_choice

    @property
    def shares_bytes(self) -> int:
        """Of the shares that come to a rank."""
        each = self.top_k if self.by_choice else self.num_ranks
        return each * self.shard_bytes


def ep_combine(
    y: torch.Tensor,
    handle: Handle,
    *,
    world: World,
    weighted: bool = True,
    by_choice: bool = False,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Own tokens' sums of what their experts have made of them, on whatever rank. Collective.

        out[t] = sum over experts e of t, in their order, of  weight(t, e) * y[slot of (t, e)]

    Without weights it carries gradients of ep_dispatch's rows back to their tokens. by_choice: sums
    are in the order of choices, the same bits for any number of ranks; a row travels for each
    choice, not for each rank that has some.

    Shapes  y: [capacity, n] by slot, contiguous; what lies behind the last slot is not read;
            handle: ep_dispatch's; out: [own tokens, n]
    Dtypes  float16, bfloat16 or float32; sums in fp32, each rank's rounded once on its way, and
            each other node's of these, where they are relayed; by_choice rounded once in all
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if not isinstance(handle, Handle):
        raise other_kind("ep_combine", "handle", handle, "the handle that ep_dispatch returned")
    if operations.is_asked(y, handle.tables.weight_of):
        call = partial(_combine, y, handle, world, weighted, by_choice, config)
        return _with_gradients(call, y, handle, weighted, world, out)
    return _combine(y, handle, world, weighted, by_choice, config, out)


def _combine(
    y: torch.Tensor, handle: Handle, world: World, weighted: bool, by_choice: bool,
    config: Config | None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The call itself, of which torch sees nothing."""
    tables = handle.tables
    rest = (handle.problem, tables.ids.shape[0], weighted, by_choice, config)
    return find_call(world, "ep_combine", (y, out), rest, _Call, by_layout)(y, out, tables)


class _Call:
    """What calls with tensors like these share on one rank; `there` is the dispatch's problem, of
    which this rank has `own` tokens."""

    tensors = ""

    def __init__(
        self, world: World, y: Any, out: Any, there: Any, own: int, weighted: bool,
        by_choice: bool, config: Config | None,
    ) -> None:  # fmt: skip
        problem = problem_of(world, y, there, weighted, by_choice)
        if out is not None:
            check_out("ep_combine", out, (own, problem.n), y.dtype, world)
        config = given_or_chosen(world, problem, config)
        self.world, self.problem, self.config = world, problem, config
        self.name = expert_parallel.name_of(problem, config, f"{weighted=} {by_choice=}")
        self._like = like((own, problem.n), y.dtype, world.device)
        self._kept, self._groups = None, None
        if not problem.is_empty and config.transport != UNFUSED:
            slots, self._groups = _slots_of(world, problem, config)
            self._kept = KeptLaunches(world, slots)

    def __call__(self, y: Any, out: Any, tables: Tables) -> torch.Tensor:
        """Queue the call; its result. Collective."""
        world, problem = self.world, self.problem
        if out is None:
            out = torch.empty_like(self._like)
        else:
            check_apart("ep_combine", out, {"y": y})
            increment_version((out,))
        world.operator_call(self.name, self.tensors)
        if self._kept is not None:
            self._kept.run([y, out, *tables], partial(self._starts, y, out, tables))
        elif not problem.is_empty:
            by_choice = problem.by_choice
            add_up = by_libraries.sums_of_choices if by_choice else by_libraries.sums_of_slots
            add_up(world, problem, y, out, tables)
        return out

    def _starts(self, y: Any, out: Any, tables: Tables, slot: Any) -> Iterator[Start]:
        there = slot, self._groups
        yield _rows(self.world, self.problem, self.config, there, y, out, tables)


def _slots_of(world: Any, problem: Problem, config: Config) -> tuple[Any, relay.Groups | None]:
    """Slots of the kernel; where nodes' sums are relayed, how parts of them lie there."""
    groups, arrays, parts = None, {"shares": problem.shares_bytes}, 0
    if config.num_nodes(problem) > 1:
        groups = relay.groups_among(problem.nodes)
        parts = groups.num_nodes * groups.per_node * groups.largest
        arrays |= {"relayed": parts * problem.shard_bytes, "has": 4 * parts * problem.rows}
    shared, signals = expert_parallel.memory_of(problem, config, "shares_ready", **arrays)
    if parts:
        signals["relayed_ready"] = (parts * config.grid(problem), torch.int64)
    return world.asked("ep_combine", signals=signals, shared=shared), groups


def _rows(
    world: Any, problem: Problem, config: Config, there: tuple[Any, relay.Groups | None], y: Any,
    out: Any, tables: Tables,
) -> Start:  # fmt: skip
    """The launch, with a slot and how nodes' parts lie there."""
    slot, groups = there
    shares, relayed = slot.shares.view(problem.torch_dtype), None
    if groups is not None:
        parts, has = slot.relayed.view(problem.torch_dtype), slot.has.view(torch.int32)
        relayed = experts.Relayed(parts, has, slot.relayed_ready, groups)
    # How many elements are read and written together.
    width = width_of(problem.row_bytes, y, out)
    tile = config.extents(problem, elements_in_vector(width, problem.itemsize))
    weights, options = tables.weight_of, config.options(world.target)
    if problem.by_choice:
        # Products are rounded before they are added, as where they are made one by one.
        weights, options = tables.weights, {**options, "enable_fp_fusion": False}
    return Start(
        experts.ep_combine_rows, (config.grid(problem), 1, 1),
        (y, out, shares, relayed, tables.ids, tables.slot_of, weights, slot.shares_ready, slot.arg,
         problem.n, problem.split(len(out)), tile.as_constexpr(), world.arg, problem.weighted,
         problem.by_choice, config.num_nodes(problem)),
        options,
    )  # fmt: skip


def problem_of(
    world: World, y: Any, there: expert_parallel.Problem, weighted: bool, by_choice: bool = False
) -> Problem:
    """The problem that this rank's tensors are a part of; `there` is the dispatch's.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    layouts.bind_sizes("ep_combine", world, {"y": y}, {"y": "slots n"})
    if y.shape[0] != there.capacity:
        raise ShapeError(
            f"ep_combine: y has {y.shape[0]} rows but the dispatch capacity={there.capacity}; pass "
            "a row for each slot"
        )
    rest = (there.experts, there.top_k, there.tile_m, there.capacity, weighted, by_choice)
    return Problem(there.m, y.shape[1], there.num_ranks, str(y.dtype), there.nodes, *rest)


# ---------------------------------------------------------------------------------------------
# Gradients
#
#     out = ep_combine(y)    dy = ep_dispatch(dout) times the slots' weights
#                            of a slot's weight: y's row times that of ep_dispatch(dout)
#
# The handle is no tensor: torch.compile runs this between graphs.


@torch.compiler.disable
def _with_gradients(
    call: Callable[..., Any], y: Any, handle: Handle, weighted: bool, world: Any, out: Any
) -> Any:
    """What `call()` gives. Raises  UsageError: out= with a gradient"""
    if not operations.is_differentiated(y, handle.tables.weight_of):
        with operations.without_autocast():
            return call(out=out)
    if out is not None:
        raise operations.no_gradient_of_out("ep_combine")
    return _Gradient.apply(y, handle.tables.weight_of, call, handle, weighted, world)


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Any, weight_of: Any, call: Any, handle: Any, weighted: bool, world: Any
    ) -> torch.Tensor:
        tables = handle.tables._replace(weight_of=weight_of.detach())
        ctx.handle, ctx.weighted, ctx.world = handle._replace(tables=tables), weighted, world
        ctx.save_for_backward(y, weight_of)
        with operations.without_autocast():
            return call()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple:  # type: ignore[override]
        ep_dispatch = provider("collectives").ep_dispatch

        y, weight_of = ctx.saved_tensors
        gradient = gradient.contiguous()
        back = ep_dispatch(gradient, handle=ctx.handle, world=ctx.world, clear=True).x
        if not ctx.weighted:
            return back, None, None, None, None, None
        back = back.float()
        dy = (back * weight_of[:, None]).to(y.dtype)
        return dy, (back * y.float()).sum(1), None, None, None, None


# ---------------------------------------------------------------------------------------------
# The card


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random results on the CPU, with NaN where no token is, and tables of random
    choices."""
    tables = random_tables(problem, rank, seed)
    y = random_rows(problem, rank, problem.capacity, seed)
    y[tables.token_of < 0] = torch.nan
    return {"y": y, **tables._asdict()}


def shaped_inputs(problem: Problem, rank: int) -> dict[str, torch.Tensor]:
    """As make_inputs, without values."""
    y = torch.empty((problem.capacity, problem.n), dtype=problem.torch_dtype)
    return {"y": y, **Tables.empty(problem, problem.own_tokens(rank), y.device)._asdict()}


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    sizes = {one.name: getattr(problem, one.name) for one in fields(expert_parallel.Problem)}
    handle = Handle(Routing.of(inputs, problem.tile_m).tables, Dispatch(**sizes))
    return ep_combine(
        inputs["y"], handle, world=world, weighted=problem.weighted, by_choice=problem.by_choice,
        config=config,
    )  # fmt: skip


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """A rank's result: its shape and dtype, without its values."""
    shape = (problem.own_tokens(rank), problem.n)
    return torch.empty(shape, dtype=problem.torch_dtype, device="meta")


SIZES = {"m": 14, "n": 40, "experts": 5, "top_k": 2}
CARD = expert_parallel.card(Problem, run, make_inputs, shaped_inputs)
CARD["default_shape"] = {**CARD["default_shape"], "by_choice": 0}

op = Op(
    name="ep_combine",
    summary="out[own token] = sum over its experts of weight * y[its slot], wherever they are",
    reference=reference,
    trials=tuple(
        Trial(nodes, {**SIZES, "by_choice": by_choice}, calls=(0, 1, 2, 0))
        for by_choice in (0, 1)
        for nodes in ((3,), (2, 1))
    ),
    baselines=_baselines.EP_COMBINE,
    fake=fake,
    backward=("ep_dispatch",),
    **CARD,
)
