"""Results of experts back to their tokens' ranks: the way back of expert parallelism.

    out[own token, :]  =  sum over its experts of  weight * y[slot of (token, expert), :]

Every rank has the results of its own experts, by slot, as ep_dispatch has sorted their tokens. A
token's experts on one rank are added up there, in fp32 and weighted, and one row goes back for each
rank that has any, rounded once; the token's rank adds these up in fp32. Experts are split in their
order, so both sums are in the order of experts, whatever comes first: results are the same bits in
every run.

Plan, `push`: one kernel on each rank, in lanes (weft.tiles.experts)
    add      slots of each rank's tokens, rank + 1's first and own last -> that rank's `shares`,
             some tokens at a time; and a word
    collect  when all ranks' words of this lane are here: own tokens' shares -> out
A share lies where its rank and its token's number say. `packets`: the same, but shares travel with
their flag, at twice the bytes, and need no word.

Signals (SET to the call's epoch e; each is waited for in the call that sets it)
    shares_ready[src * lanes + l]  what lane l of rank src has for this rank is here. By src; not of
                                   packets
    slot_free, epoch, ticket       the slot's; the last program moves them
Ranks without tokens signal too.

Limits  y is contiguous; `shares` has room for a row of each rank for each own token
Source  the design's section 4; DeepEP's combine for the idea
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

import weft.language as wl
from weft.base.card import Op, Trial
from weft.base.errors import ShapeError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.ops import _baselines, _ep, _lanes, _operations
from weft.ops._ep import Config, Handle, candidates, choose
from weft.ops.moe_route import Tables
from weft.runtime.world import World
from weft.tiles import experts as ep
from weft.tiles import move


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once: shares of each rank in the order of its slots, then of ranks, in fp32."""
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


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_ep.Problem):
    """Results of n elements for the tokens of a dispatch; sums of them, or of them `weighted`."""

    weighted: bool = True

    op = "ep_combine"


# ---------------------------------------------------------------------------------------------
# The program


@triton.jit
def ep_combine_rows(y, out, shares, ids, slot_of, weight_of, shares_ready, slot, n, split, tile,
                    world, packets: tl.constexpr, weighted: tl.constexpr):  # fmt: skip
    """Lane by lane."""
    rank = wl.rank(world).to(tl.int32)
    n = tl.cast(n, tl.int64) // tile.vec * tile.vec  # seen to be a multiple, which it is
    e = move.begin(world, slot)
    if packets:
        flag = e.to(tl.int32)
    else:
        flag = None
    for hop in range(1, world.num_ranks + 1):
        to = (rank + hop) % world.num_ranks
        ep.add(world, shares, y, slot_of, weight_of, rank, to, n, split, tile, flag, weighted)
        if not packets:
            wl.notify(world, move.word_of(shares_ready, rank), e, to=to, op=wl.SignalOp.SET)
    if not packets:
        for source in range(world.num_ranks):
            # Pairs with the notify above.
            wl.wait(move.word_of(shares_ready, source), e, world=world)
    ep.collect(world, out, shares, ids, n, split, tile, flag)
    move.end(world, slot, e)


# ---------------------------------------------------------------------------------------------
# The host


def ep_combine(
    y: torch.Tensor,
    handle: Handle,
    *,
    world: World,
    weighted: bool = True,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Own tokens' sums of what their experts have made of them, on whatever rank. Collective.

        out[t] = sum over experts e of t, in their order, of  weight(t, e) * y[slot of (t, e)]

    Without weights it carries gradients of ep_dispatch's rows back to their tokens.

    Shapes  y: [capacity, n] by slot, contiguous; what lies behind the last slot is not read;
            handle: ep_dispatch's; out: [own tokens, n]
    Dtypes  float16, bfloat16 or float32; sums in fp32, each rank's rounded once on its way
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if _operations.is_asked(y, handle.tables.weight_of):
        call = partial(_combine, y, handle, world, weighted, config)
        return _operations.between_graphs("ep_combine")(call, y, handle, weighted, world, out)
    return _combine(y, handle, world, weighted, config, out)


def _combine(
    y: torch.Tensor, handle: Handle, world: World, weighted: bool, config: Config | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The call itself, of which torch sees nothing."""
    problem = problem_of(world, y, handle, weighted)
    config = config or choose(problem, world.target)
    config.check(problem, world.target)
    tables, own = handle.tables, handle.tables.ids.shape[0]
    if out is None:
        out = torch.empty((own, problem.n), dtype=y.dtype, device=y.device)
    else:
        _lanes.check_out("ep_combine", out, (own, problem.n), y.dtype, world)
        increment_version((out,))
    world.operator_call(_ep.call_name(problem, config, f"weighted={weighted}"))
    if problem.is_empty:
        return out
    lanes = config.grid(problem)
    buffers, words = {}, {"shares_ready": problem.num_ranks * lanes}
    if config.by_packets:
        words["shares"] = config.packets(problem, problem.row_bytes)
    else:
        buffers["shares"] = ((problem.num_tokens, problem.n), y.dtype)
    signals = {name: (count, torch.int64) for name, count in words.items()}
    slot = world.workspace(f"ep_combine.{config.transport}", buffers, signals)
    tile = config.extents(problem, _vec(problem, y, out)).as_constexpr()
    ep_combine_rows[(lanes,)](
        y, out, slot.shares, tables.ids, tables.slot_of, tables.weight_of, slot.shares_ready,
        slot.arg, problem.n, _ep.split_of(problem, own), tile, world.arg, config.by_packets,
        weighted, **config.options(world.target),
    )  # fmt: skip
    return out


def _vec(problem: Problem, *tensors: torch.Tensor) -> int:
    """How many elements are read and written together."""
    width = _lanes.width_of(problem.row_bytes, *tensors)
    return _lanes.elements_in_vector(width, problem.itemsize)


def problem_of(world: World, y: Any, handle: Handle, weighted: bool) -> Problem:
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    _ep.check_rows(world, "ep_combine", "y", y)
    there = handle.problem
    if y.shape[0] != there.capacity:
        raise ShapeError(
            f"ep_combine: y has {y.shape[0]} rows but the dispatch capacity={there.capacity}; pass "
            "a row for each slot"
        )
    rest = (there.experts, there.top_k, there.tile_m, there.capacity, weighted)
    return Problem(there.m, y.shape[1], there.num_ranks, str(y.dtype), there.nodes, *rest)


# ---------------------------------------------------------------------------------------------
# The card


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random results on the CPU, with NaN where no token is, and tables of random
    choices: a call has nothing before it that would keep ranks together."""
    everyone = range(problem.num_ranks)
    choices = [_ep.make_choices(problem, other, seed) for other in everyone]
    tables = _ep.reference_tables(problem, choices)[rank]
    y = _lanes.random_rows(problem, rank, problem.capacity, seed)
    y[tables.token_of < 0] = torch.nan
    return {"y": y, **tables._asdict()}


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    tables = Tables(**{name: inputs[name] for name in Tables._fields})
    handle = Handle(tables, problem)
    return ep_combine(
        inputs["y"], handle, world=world, weighted=problem.weighted, config=config
    )  # fmt: skip


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or choose(problem, target)
    config.check(problem, target)
    types = {"shares_ready": "*i64"}
    if config.by_packets:
        types["shares"] = "*i64"
    tile = config.extents(problem, _vec(problem))
    constants = {"weighted": problem.weighted, "tile": tile, "packets": config.by_packets}
    yield _ep.record(ep_combine_rows, problem, config, target, types, constants)


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """A rank's result: its shape and dtype, without its values."""
    first, end = problem.shard(rank)
    return torch.empty((end - first, problem.n), dtype=problem.torch_dtype, device="meta")


op = Op(
    name="ep_combine",
    summary="out[own token] = sum over its experts of weight * y[its slot], wherever they are",
    problem=Problem,
    config=Config,
    make_problem=partial(_ep.make_problem, Problem),
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=kernels,
    trials=(
        Trial((3,), {"m": 14, "n": 40, "experts": 5, "top_k": 2}, calls=(0, 1, 2, 0)),
        Trial((2, 1), {"m": 14, "n": 40, "experts": 5, "top_k": 2}, calls=(0, 1, 2, 0)),
    ),
    baselines=_baselines.EP_COMBINE,
    fake=fake,
    backward=("ep_dispatch",),
    **_ep.CARD,
)
