"""Attention of own queries over the keys and values of all ranks, gathered while they are used.

    out[t]  =  softmax over visible j of (scale * q[t] . k[j])  @  v         of all ranks' k and v
    lse[t]  =  log(sum over visible j of exp(scale * q[t] . k[j]))

m tokens, of sequences packed one behind the other, are split as torch.chunk splits them: every rank
has its tokens' q, k and v, and ends with its tokens' out. A token sees its own sequence; `causal`,
no key behind itself. Sequences may span ranks.

Plan, `put` (copy engines carry keys to where they are needed)
    copy    take              returns when every rank's slot is free
            copies            per rank + 1, + 2, ..., none before own rank where causal, and chunk:
                              own k, own v, and the word that says so
    main    ag_attention_attend   all programs attend
Plan, `push` (SMs carry them)
    main    ag_attention_attend   the first `lanes` programs store own chunks in those ranks' slots,
                              each chunk and its word in one go; then all attend
A tile of queries (weft.tiles.attention) keeps its state while keys pass: own ones first, read in
place; then those of rank - 1, - 2, ... and, not causal, those of the last rank down to rank + 1;
of each, chunk by chunk. It waits for a chunk just before it reads it, and only for chunks in
which its own queries' sequences and causality let it see a key. That order is fixed: results are
the same bits in every run, on every schedule.

Signals (SET to the call's epoch e, read on the device)
    rows_ready[src * chunks + c]  chunk c of src's k and v is in this rank's slot. By src, or by its
                                  copy engine; own ones by `take`, as what engines copy
    slot_free, epoch, ticket      the slot's; the last program of ag_attention_attend moves them
By `put` one program waits for all words that come before the slot is given back: else a word that
no tile needed could undo one of the next call's.

Limits  contiguous tensors; cu_seqlens is the same on all ranks and its numbers are not checked:
        they are on the device. Causal ranks have unequal work, the last one most of it
Source  docs/decisions/009-hooks.md; ring attention (Liu et al. 2023) for keys that pass
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.card import Op, Trial, trials
from weft.base.dtypes import DTYPES
from weft.base.errors import DtypeError, ShapeError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.compiler import layouts
from weft.language import mapping, slots
from weft.ops import _baselines, _lanes, _operations, _records
from weft.ops._ag_attention_call import Call
from weft.ops._ag_attention_config import (
    ENGINE,
    TRANSPORTS,
    Config,
    Problem,
    Shards,
    candidates,
    choose,
    shape_of,
)
from weft.plan import moving
from weft.runtime.world import World
from weft.tiles import attention, move

# Scores of 128k keys are 2 GB then.
REFERENCE_ROWS = 4096


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """All ranks at once, in fp32, sequence by sequence, head by head, REFERENCE_ROWS at a time."""
    q, k, v = (torch.cat([one[name] for one in inputs]).float() for name in ("q", "k", "v"))
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], -torch.inf)
    table = inputs[0]["cu_seqlens"]
    ends = [0, problem.m] if table is None else table.tolist()
    for first, end in zip(ends, ends[1:], strict=False):
        for row in range(first, end, REFERENCE_ROWS):
            one = slice(row, min(row + REFERENCE_ROWS, end))
            # Keys behind all of them need not be looked at.
            keys = slice(first, one.stop if problem.causal else end)
            for head in range(problem.q_heads):
                of_k = head // problem.group
                scores = q[one, head] @ k[keys, of_k].t() * problem.d**-0.5
                if problem.causal:
                    scores += torch.full_like(scores, -torch.inf).triu(1 + row - first)
                out[one, head] = scores.softmax(1) @ v[keys, of_k]
                lse[one, head] = scores.logsumexp(1)
    shards = [slice(*problem.shard(rank)) for rank in range(problem.num_ranks)]
    return [(out[own], lse[own]) for own in shards]


# ---------------------------------------------------------------------------------------------
# The program


class Arrival(NamedTuple):
    """Arguments of `_segments` and `_ready`; values first, tuples last (see ag_gemm)."""

    k: Any
    v: Any
    k_gathered: Any
    v_gathered: Any
    rows_ready: Any
    e: Any
    rank: Any
    shards: Any
    world: World


@triton.jit
def _sources(at, args):
    """How many ranks before this one have keys that a tile meets, and the last rank that has any.
    args: Arrival"""
    first = min(at.lo // args.shards.rows, args.rank)
    return args.rank - first, max((at.hi - 1) // args.shards.rows, args.rank)


@triton.jit
def _segments(at, args):
    """Own keys, and the chunks of each rank that has any. args: Arrival"""
    before, last = _sources(at, args)
    count = 1 + (before + last - args.rank) * args.shards.chunks
    return count * min(max(at.hi - at.lo, 0), 1)


@triton.jit
def _chunk_of(at, segment, args):
    """(source, chunk, first token, end) of a segment but the first: ranks before this one, the
    nearest first, then those behind it, the last first; of each, chunk by chunk. args: Arrival"""
    shards = args.shards
    before, last = _sources(at, args)
    hop = (segment - 1) // shards.chunks
    chunk = (segment - 1) % shards.chunks
    # Arithmetic, not branches: the same text serves integers and traced scalars.
    is_behind = min(max(hop - before + 1, 0), 1)
    source = (args.rank - 1 - hop) * (1 - is_behind) + (last - hop + before) * is_behind
    first = source * shards.rows + chunk * shards.chunk_rows
    end = min(first + shards.chunk_rows, (source + 1) * shards.rows, shards.m)
    return source, chunk, first, end


@triton.jit
def _ready(at, segment, tile, args):
    """Own keys in place; others once their chunk has arrived. args: Arrival"""
    shards = args.shards
    source, chunk, row, end = _chunk_of(at, segment, args)
    position = row
    k = args.k_gathered
    v = args.v_gathered
    if segment == 0:
        k = args.k
        v = args.v
        position = args.rank * shards.rows
        row = 0
        end = tl.minimum(shards.m - position, shards.rows)
    elif tl.maximum(row, at.lo) < tl.minimum(end, at.hi):
        # Pairs with _push, or with the copy engine's words.
        wl.wait(args.rows_ready + source * shards.chunks + chunk, args.e, world=args.world)
    return attention.Segment(k, v, row, end, position)


@triton.jit
def _push(world, k, v, k_gathered, v_gathered, rows_ready, e, rank, own, lane, shards,
          causal: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """Every lanes-th chunk of own keys and values -> the slots of ranks behind, and its word."""
    peers = world.num_ranks - 1
    if causal:
        peers -= rank
    first = (rank * shards.rows).to(tl.int64) * shards.columns
    for unit in range(lane, peers * shards.chunks, shards.lanes):
        to = (rank + 1 + unit // shards.chunks) % world.num_ranks
        chunk = unit % shards.chunks
        begin = tl.minimum(chunk * shards.chunk_rows, own)
        rows = tl.minimum(begin + shards.chunk_rows, own) - begin
        size = rows.to(tl.int64) * shards.columns
        offset = begin.to(tl.int64) * shards.columns
        move.send(world, k_gathered + first + offset, k + offset, size, to, block)
        move.send(world, v_gathered + first + offset, v + offset, size, to, block)
        word = rows_ready + rank * shards.chunks + chunk
        wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def ag_attention_attend(q, k, v, out, lse, cu_seqlens, k_gathered, v_gathered, rows_ready, slot,
                        shape, shards, tile, world, by_engine: tl.constexpr,
                        causal: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """The attention template with the hooks above; before it, the lanes store own keys."""
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    first, own_end = mapping.part_of(shards.m, rank, shards.rows)
    own = own_end - first
    if not by_engine:
        if program < shards.lanes:
            slots.slot_wait_free(world, slot, e)
            _push(world, k, v, k_gathered, v_gathered, rows_ready, e, rank, own, program, shards,
                  causal, block)  # fmt: skip
    end = tl.cast(shards.m, tl.int32)
    if cu_seqlens is None:
        visible: tl.constexpr = attention.visible_before if causal else attention.visible_all
        visible_args = attention.One(first, end)
    else:
        visible: tl.constexpr = (
            attention.visible_before_in_sequences if causal else attention.visible_in_sequences
        )
        count = tl.cast(shards.sequences, tl.int32)
        steps = tl.cast(shards.steps, tl.int32)
        visible_args = attention.Lengths(cu_seqlens, count, steps, first, end)
    # Lanes come last in every round.
    attention.attention(
        q, shape, tile, tl.cdiv(own, tile.tokens), num_programs - 1 - program, num_programs,
        attention.last_first, None, visible, visible_args,
        _segments, _ready,
        Arrival(k, v, k_gathered, v_gathered, rows_ready, e, rank, shards, world),
        attention.emit_store, attention.Stored(out, lse, shape),
    )  # fmt: skip
    if by_engine:
        if program == 0:
            # Also those that no tile needed: late, they would be the next call's. And an own one:
            # `take` has read the epoch, which ends with this call.
            if causal:
                count = rank * shards.chunks + 1
            else:
                count = world.num_ranks * shards.chunks
            wl.wait(rows_ready, e, count, world=world)
    slots.slot_finish(world, slot, e, num_programs)


# ---------------------------------------------------------------------------------------------
# The host


@overload
def ag_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    world: World,
    causal: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    m: int | None = None,
    config: Config | None = None,
    out: torch.Tensor | None = None,
    with_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def ag_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    world: World,
    causal: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    m: int | None = None,
    config: Config | None = None,
    out: torch.Tensor | None = None,
    with_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def ag_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    world: World,
    causal: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    m: int | None = None,
    config: Config | None = None,
    out: torch.Tensor | None = None,
    with_lse: bool = False,
) -> Any:
    """Attend own queries over the keys and values of all ranks. Collective.

        out[t] = softmax over j of (scale * q[t] . k[j]) @ v,  j: of t's sequence; causal: j <= t

    Shapes  q: [own tokens, q_heads, d]; k, v: [own tokens, kv_heads, d]; out as q; all contiguous,
            q_heads a multiple of kv_heads, d from 1 to 256. m: tokens of all ranks, by default
            num_ranks * own ones: pass it where shards differ. cu_seqlens: int32[sequences + 1], the
            first token of each sequence and the end of the last, alike on all ranks; by default
            one sequence of all tokens. Tokens of none have out = 0, lse = -inf
    Dtypes  all alike, float16, bfloat16 or float32; scores, sums and lse in fp32
    Units   scale is 1 / sqrt(d) by default; lse, given back as (out, lse) if asked for, is the
            natural logarithm, [own tokens, q_heads]
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded, and a
            replay goes by the cu_seqlens that are there then
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if _operations.is_asked(q, k, v):
        rest = (cu_seqlens, causal, scale, m)
        found = _operations.as_operation(
            "ag_attention", world, (q, k, v), *rest, config=config, out=out
        )  # fmt: skip
        return found if with_lse else found[0]
    call = _lanes.find_call(
        world, "ag_attention", (q, k, v, cu_seqlens, out), (causal, scale, m, config), _make_call
    )
    world.operator_call(call.name, call.tensors)
    if out is None:
        out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not call.problem.is_empty:
        call.launch(world, (q, k, v, out, lse, cu_seqlens))
    return (out, lse) if with_lse else out


def _make_call(
    world: World, q: Any, k: Any, v: Any, cu_seqlens: Any, out: Any, causal: bool,
    scale: float | None, m: int | None, config: Config | None,
) -> Call:  # fmt: skip
    problem = problem_of(world, q, k, v, cu_seqlens, causal, m, out)
    config = config or choose(problem, world.target)
    config.check(problem, world.target)
    return Call(world, problem, config, scale, ag_attention_attend)


def problem_of(
    world: World, q: Any, k: Any, v: Any, cu_seqlens: Any, causal: bool, m: int | None = None,
    out: Any = None,
) -> Problem:  # fmt: skip
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            raise ShapeError(
                f"ag_attention: {name} has shape {tuple(tensor.shape)}; it must be [own tokens, "
                "heads, d]"
            )
        layouts.check_tensor("ag_attention", name, tensor, world)
        if tensor.dtype != q.dtype:
            raise DtypeError(
                f"ag_attention: q is {q.dtype} but {name} is {tensor.dtype}; convert one of them"
            )
    if v.shape != k.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ShapeError(
            f"ag_attention: q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; "
            "tokens and d are alike in all, heads in k and v"
        )
    sequences = _check_lengths(cu_seqlens, world)
    tokens, q_heads, d = q.shape
    m = tokens * world.num_ranks if m is None else m
    kv_heads = k.shape[1]
    problem = Problem(
        m, kv_heads * d, world.num_ranks, str(q.dtype), _lanes.nodes_of(world), q_heads, kv_heads,
        d, causal, sequences,
    )  # fmt: skip
    first, end = problem.shard(world.rank)
    if tokens != end - first:
        raise ShapeError(
            f"ag_attention: rank {world.rank} of {world.num_ranks} passes {tokens} tokens, but of "
            f"m={m} it holds {end - first} (tokens {first} to {end} of torch.chunk); pass m= where "
            "shards differ"
        )
    if out is not None:
        _lanes.check_out("ag_attention", out, q.shape, q.dtype, world)
    return problem


def _check_lengths(cu_seqlens: Any, world: World) -> int:
    """How many sequences there are; 0 without a table."""
    if cu_seqlens is None:
        return 0
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ShapeError(
            f"ag_attention: cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be [sequences "
            "+ 1], of one sequence at least"
        )
    if cu_seqlens.dtype != torch.int32:
        raise DtypeError(
            f"ag_attention: cu_seqlens is {cu_seqlens.dtype}; it must be torch.int32: pass "
            "cu_seqlens.int()"
        )
    layouts.check_tensor("ag_attention", "cu_seqlens", cu_seqlens, world)
    return cu_seqlens.shape[0] - 1


# ---------------------------------------------------------------------------------------------
# The card


def make_problem(
    num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Problem:
    names = ("q_heads", "kv_heads", "d")
    heads = {name: shape[name] for name in names}
    return Problem(
        shape["m"], shape["kv_heads"] * shape["d"], num_ranks, dtype, nodes, **heads,
        causal=bool(shape["causal"]), sequences=shape["sequences"],
    )  # fmt: skip


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, Any]:
    """One rank's normal random tensors on the CPU, and lengths that are alike on all ranks: the
    same for one seed on every machine."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    first, end = problem.shard(rank)
    heads = {"q": problem.q_heads, "k": problem.kv_heads, "v": problem.kv_heads}
    drawn = {
        name: torch.randn(end - first, count, problem.d, generator=generator)
        for name, count in heads.items()
    }
    inputs = {name: tensor.to(problem.torch_dtype) for name, tensor in drawn.items()}
    lengths = None
    if problem.sequences:
        # Some are empty, some span ranks.
        alike = torch.Generator().manual_seed(seed)
        cuts = torch.randint(0, problem.m + 1, (problem.sequences - 1,), generator=alike)
        ends = torch.tensor([0, problem.m], device=cuts.device)
        lengths = torch.cat([ends[:1], cuts.sort().values, ends[1:]]).int()
    return {**inputs, "cu_seqlens": lengths}


def run(
    world: World, problem: Problem, inputs: Mapping[str, Any], config: Config | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return ag_attention(
        inputs["q"], inputs["k"], inputs["v"], world=world, causal=problem.causal,
        cu_seqlens=inputs["cu_seqlens"], m=problem.m, config=config, with_lse=True,
    )  # fmt: skip


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernels that a call with this configuration launches, as records."""
    config = config or choose(problem, target)
    config.check(problem, target)
    element = f"*{DTYPES[problem.dtype].triton}"
    types = {
        **dict.fromkeys(("q", "k", "v", "out", "k_gathered", "v_gathered"), element),
        "lse": "*fp32",
        **({"cu_seqlens": "*i32"} if problem.sequences else {}),
        "rows_ready": "*i64",
        "own_words": "*i64",
        "num_own": "i32",
        "shape": ["i32"] * (len(attention.Shape._fields) - 1) + ["fp32"],
    }
    constants = {
        **({} if problem.sequences else {"cu_seqlens": None}),
        "tile": config.tile(problem),
        "by_engine": config.transport == ENGINE,
        "causal": problem.causal,
        "block": config.block,
    }
    extents = {f"shape.{name}": size for name, size in shape_of(problem, 0)._asdict().items()}
    extents["shards.columns"] = problem.n

    def record(fn: Any, name: str, options: dict[str, int]) -> tuple[Any, KernelRecord]:
        return _records.record(
            fn, f"ag_attention.{name}", problem.num_ranks, types,
            tuples={"shape": attention.Shape, "shards": Shards}, constants=constants,
            options=options,
            aligned=[name for name, size in extents.items() if size and size % 16 == 0],
        )  # fmt: skip

    if config.transport == ENGINE:
        yield record(moving.take, "take", {"num_warps": 1})
    yield record(ag_attention_attend, "attend", config.options())


def fake(
    problem: Problem, inputs: Mapping[str, Any], rank: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result's shapes and dtypes, without values."""
    first, end = problem.shard(rank)
    shape = (end - first, problem.q_heads, problem.d)
    out = torch.empty(shape, dtype=problem.torch_dtype, device="meta")
    return out, torch.empty(shape[:2], dtype=torch.float32, device="meta")


SMALL = {"m": 40, "q_heads": 2, "kv_heads": 1, "d": 16, "sequences": 2, "causal": 1}
op = Op(
    name="ag_attention",
    summary="out = softmax(q @ all_gather(k)^T) @ all_gather(v), causal, of packed sequences",
    problem=Problem,
    config=Config,
    make_problem=make_problem,
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=kernels,
    default_shape={**SMALL, "m": 128, "q_heads": 4, "kv_heads": 2, "d": 32},
    smallest={**SMALL, "m": 16, "q_heads": 2, "kv_heads": 1, "d": 16, "sequences": 0},
    smallest_config={"lanes": 1, "chunks": 1},
    trials=(
        *trials(SMALL),
        *(Trial((3,), {**SMALL, "causal": 0, "sequences": 0}, name) for name in TRANSPORTS),
        # Words of chunks without rows, which no tile waits for, are copied late.
        Trial((3,), {**SMALL, "causal": 0}, ENGINE, calls=(2, 0, 2, 0, 2, 0)),
        # Inputs change as soon as a call is over.
        Trial((2,), SMALL, ENGINE, on_heap=True),
    ),
    awkward_shapes=(
        (4, {**SMALL, "m": 97, "sequences": 5}),
        (3, {**SMALL, "m": 67, "q_heads": 6, "kv_heads": 2, "d": 20, "causal": 0}),
        (2, {**SMALL, "m": 1, "sequences": 1}),
        (1, {**SMALL, "m": 40, "sequences": 0}),
        (4, {**SMALL, "m": 9}),
        (4, {**SMALL, "m": 0, "sequences": 1}),
    ),
    baselines=_baselines.AG_ATTENTION,
    fake=fake,
    backward=("all_gather", "reduce_scatter"),
    takes_nodes=True,
)
