"""Products of tokens with their experts, weighted, then reduce-scatter, as one operator.

    out[own token, :]  =  sum over ranks and over j of  weight * (x[slot, :] @ b[expert of slot])
                          slot = slot_of[own token, j],  j = 0 .. top_k - 1

Every rank has all m * top_k slots of x, in moe_route's order, but a part of k, and that part of
every expert's rows; tokens are split as torch.chunk splits them, and a rank ends with its own: the
down projection of a mixture of experts. Which slots an expert has is known on the device alone.

Plan, `push`: one kernel on each rank, the GEMM template with hooks (weft.tiles.grouped)
    order     tiles by the table, in moe_route's turns from the last one: own tokens' come last
    emit      rows times their weights -> `partials` of the rank whose token each is
    announce  tells the ranks that have tokens in the tile
    then      own tokens: waits for all ranks' tiles that have any, and adds up in fp32: this rank's
              share, rank + 1's, ..; of each the first choice's, the second's, ..
The order of sums is fixed, so results are the same bits in every run. Shares travel in the result's
dtype.

Signals (SET to the call's epoch e, read on the device; waited for in the call that sets it)
    partials_ready[tile, src, column]   src's share of this rank's tokens in this tile is here. By
                                        src
    slot_free, epoch, ticket            the slot's; the last program moves them
Of a tile without own tokens nobody tells, and nobody waits: both know it by the tables.

Limits  as ag_moe; what travels is a row for each choice of a token, not one for each token
Source  docs/decisions/009-hooks.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.card import Op, Trial, trials
from weft.base.dtypes import DTYPES
from weft.base.errors import ShapeError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.language import slots
from weft.ops import _lanes, _moe
from weft.ops.moe_route import Routing
from weft.tiles import gemm, grouped

TABLES = ("token_of", "slot_of", "tiles", "turns", "num_tiles")
# Columns that are added up at a time.
BLOCK = 1024


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32."""
    tables, sums = inputs[0], torch.zeros(problem.m, problem.n)
    for one in inputs:
        weighted = _moe.product(problem, one["x"], one) * tables["weight_of"][:, None]
        for j in range(problem.top_k):
            sums += weighted[tables["slot_of"][:, j].long()]
    return [sums[slice(*problem.shard(rank))] for rank in range(problem.num_ranks)]


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_moe.Problem):
    """m tokens over all ranks, n columns of the result; k of every expert on each rank."""

    op = "moe_rs"


@dataclass(frozen=True)
class Config(_moe.Config):
    """Nothing more."""


candidates = partial(_moe.candidates, Config)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The program


class Choices(NamedTuple):
    """m tokens, `rows` to a rank, each with top_k choices; the table has room for `room` tiles of
    `columns` columns."""

    m: Any
    rows: Any
    top_k: Any
    room: Any
    columns: Any


class Scatter(NamedTuple):
    """Arguments of the hooks."""

    partials: Any
    partials_ready: Any
    token_of: Any
    slot_of: Any
    weight_of: Any
    e: Any
    rank: Any
    n: Any
    choices: Any
    world: Any


@triton.jit
def _choice_of(slot, token, args, mask):
    """Which of its token's choices a slot is. args: Scatter"""
    found = tl.zeros_like(slot)
    for j in range(args.choices.top_k):
        same = tl.load(args.slot_of + token * args.choices.top_k + j, mask=mask, other=-1) == slot
        found += tl.where(same, j, 0)
    return found


@triton.jit
def _emit(at, value, tile, args):
    """Each row -> the rank whose token it is. args: Scatter"""
    slot = at.first + tl.arange(0, tile.m)
    here = slot < at.end
    token = tl.load(args.token_of + slot, mask=here, other=0)
    weight = tl.load(args.weight_of + slot, mask=here, other=0.0)
    j = at.i_n * tile.n + tl.arange(0, tile.n)
    owner = token // args.choices.rows
    row = (token - owner * args.choices.rows) * args.choices.top_k
    row += _choice_of(slot, token, args, here)
    place = (args.rank * args.choices.rows * args.choices.top_k + row).to(tl.int64) * args.n
    there = args.partials + place[:, None] + j[None, :]
    share = (value * weight[:, None]).to(args.partials.dtype.element_ty)
    for to in range(at.lo, at.hi + 1):
        mask = (here & (owner == to))[:, None] & (j < args.n)[None, :]
        wl.put(args.world, there, share, to=to, mask=mask)


@triton.jit
def _announce(at, part, args):
    """The ranks with tokens in the tile learn that they are there. args: Scatter"""
    word = (at.i_m * args.world.num_ranks + args.rank) * args.choices.columns + at.i_n
    for to in range(at.lo, at.hi + 1):
        wl.notify(args.world, args.partials_ready + word, args.e, to=to, op=wl.SignalOp.SET)


@triton.jit
def _await_tiles(tiles, num_tiles, partials_ready, e, rank, choices, world):
    """Until all ranks' shares of own tokens have come; pairs with _announce."""
    words = world.num_ranks * choices.columns
    for tile in range(num_tiles):
        lo = tl.load(tiles + 3 * choices.room + tile)
        hi = tl.load(tiles + 4 * choices.room + tile)
        if (lo <= rank) & (rank <= hi):
            wl.wait(partials_ready + tile * words, e, words, world=world)


@triton.jit
def _sum_tokens(out, partials, rank, own, n, choices, num_ranks: tl.constexpr,
                block: tl.constexpr):  # fmt: skip
    """Own tokens, one by one: all ranks' shares of all choices, in fp32."""
    pieces = tl.cdiv(n, block)
    for unit in range(tl.program_id(0), own * pieces, tl.num_programs(0)):
        token = unit // pieces
        column = (unit - token * pieces) * block + tl.arange(0, block)
        total = tl.zeros((block,), tl.float32)
        for hop in range(num_ranks):
            source = (rank + hop) % num_ranks
            first = (source * choices.rows + token) * choices.top_k
            for j in range(choices.top_k):
                there = partials + (first + j).to(tl.int64) * n + column
                total += tl.load(there, mask=column < n, other=0.0).to(tl.float32)
        place = out + token.to(tl.int64) * n + column
        tl.store(place, total.to(out.dtype.element_ty), mask=column < n)


@triton.jit
def moe_rs_multiply(x, b, out, weight_of, token_of, slot_of, tiles, turns, num_tiles, partials,
                    partials_ready, slot, shape, choices, tile, world, group_m: tl.constexpr,
                    block: tl.constexpr):  # fmt: skip
    """The GEMM template with the hooks above, then the sums of own tokens."""
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    count = tl.load(num_tiles)
    # Written out each time: a variable would make numbers of the world's constants.
    # weft: allow peer-from-data: moe_route writes lo and hi, and they are ranks
    gemm.gemm(
        b, shape, tile, count, tl.program_id(0), tl.num_programs(0),
        grouped.in_turn_backwards, grouped.Turns(tiles, turns, choices.room, group_m),
        grouped.read_slots, grouped.Slots(x),
        _emit, Scatter(partials, partials_ready, token_of, slot_of, weight_of, e, rank, shape.n,
                       choices, world),
        None, None,
        _announce, Scatter(partials, partials_ready, token_of, slot_of, weight_of, e, rank, shape.n,
                           choices, world),
    )  # fmt: skip
    _await_tiles(tiles, count, partials_ready, e, rank, choices, world)
    own = tl.minimum(tl.maximum(choices.m - rank * choices.rows, 0), choices.rows)
    _sum_tokens(out, partials, rank, own, shape.n, choices, world.num_ranks, block)
    slots.slot_finish(world, slot, e, tl.num_programs(0))


# ---------------------------------------------------------------------------------------------
# The host


def moe_rs(
    x: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    *,
    world: Any,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's tokens: the weighted sums of all ranks' products with their experts. Collective.

        out[t] = sum over ranks, j of  weight_of[s] * (x[s] @ b[expert of s]),  s = slot_of[t, j]

    Shapes  x: [m * top_k, k] by slot, contiguous; b: [experts, k, n], contiguous or the transpose
            of a contiguous [experts, n, k]; out: [own tokens, n]
    Dtypes  all alike, float16, bfloat16 or float32; sums in fp32, shares rounded once on their way
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    problem = problem_of(world, x, b, routing, out)
    config = config or choose(problem, world.target)
    config.check(problem, world.target)
    world.operator_call(_moe.call_name(problem, config))
    first, end = problem.shard(world.rank)
    if out is None:
        out = torch.empty((end - first, problem.n), dtype=x.dtype, device=x.device)
    if problem.is_empty:
        return out.zero_()
    rows = problem.num_ranks * problem.rows * problem.top_k
    words = problem.routing.max_tiles * problem.num_ranks * config.columns(problem)
    slot = world.workspace(
        "moe_rs",
        {"partials": ((rows, problem.n), x.dtype)},
        {"partials_ready": (words, torch.int64)},
    )
    tables = [getattr(routing.tables, name) for name in ("weight_of", *TABLES)]
    moe_rs_multiply[(config.grid(problem, world.target),)](
        x, b, out, *tables, slot.partials, slot.partials_ready, slot.arg, _moe.shape_of(problem),
        _choices(problem, config), config.tile(problem).as_constexpr(), world.arg,
        config.group_m, BLOCK, **config.options(),
    )  # fmt: skip
    return out


def _choices(problem: Problem, config: Config) -> Choices:
    sizes = (problem.m, problem.rows, problem.top_k, problem.routing.max_tiles)
    return Choices(*sizes, config.columns(problem))


def problem_of(world: Any, x: Any, b: Any, routing: Routing, out: Any = None) -> Problem:
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    problem = _moe.problem_of(Problem, world, x, b, routing)
    if x.shape[0] != problem.num_slots:
        raise ShapeError(
            f"moe_rs: x has {x.shape[0]} rows, but m={problem.m} tokens with top_k={problem.top_k} "
            f"were routed: {problem.num_slots} slots; pass what ag_moe gives"
        )
    if out is not None:
        first, end = problem.shard(world.rank)
        _lanes.check_out("moe_rs", out, (end - first, problem.n), x.dtype, world)
    return problem


# ---------------------------------------------------------------------------------------------
# The card


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's tensors, the same for one seed on every machine."""
    return _moe.make_inputs(problem, problem.num_slots, rank, seed)


def run(
    world: Any, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    routing = _moe.routing_of(problem, inputs)
    return moe_rs(inputs["x"], inputs["b"], routing, world=world, config=config)


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or choose(problem, target)
    config.check(problem, target)
    element = f"*{DTYPES[problem.dtype].triton}"
    operands = ("x", "b", "out", "partials")
    constants = {"choices": Choices(*[None] * len(Choices._fields)), "block": BLOCK}
    types = {
        **dict.fromkeys(operands, element),
        **dict.fromkeys(TABLES, "*i32"),
        "weight_of": "*fp32",
        "partials_ready": "*i64",
        "choices": ["i32"] * len(Choices._fields),
    }
    yield _moe.record(moe_rs_multiply, problem, config, types, constants)


def fake(problem: Problem, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The first rank's result: its shape and dtype, without its values."""
    shape = (min(problem.rows, problem.m), problem.n)
    return torch.empty(shape, dtype=problem.torch_dtype, device="meta")


op = Op(
    name="moe_rs",
    summary="out = own tokens of sum(weight * x[slot, k] @ b[expert of slot]) over ranks, choices",
    problem=Problem,
    config=Config,
    make_problem=partial(_moe.make_problem, Problem),
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=kernels,
    trials=(
        *trials({"m": 20, "n": 24, "k": 16, "experts": 4, "top_k": 2}),
        Trial((2,), {"m": 40, "n": 40, "k": 16, "experts": 2, "top_k": 1}),
    ),
    fake=fake,
    **_moe.CARD,
)
