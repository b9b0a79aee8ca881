"""Attention of own queries over the keys and values of all ranks, gathered while they are used.

    out[t]  =  softmax over visible j of (scale * q[t] . k[j])  @  v         of all ranks' k and v
    lse[t]  =  log(sum over visible j of exp(scale * q[t] . k[j]))

m tokens, of sequences packed one behind the other, are split as torch.chunk splits them, or each
sequence `zigzag` (weft.plan.sequence_shards), by which causal ranks have the same work. A token
sees its own sequence; `causal`, no key behind itself. Sequences may span ranks.

Plan, `ce_push` (copy-engine push)
    main    list_visible      zigzag: which keys of each rank own queries see
    copy    take              returns when every rank's slot is free
            copies            per rank + 1, + 2, ..., none before own rank where causal and not
                              zigzag, and chunk: own k, own v, the signal that announces both
    main    ag_attention_attend   all programs attend
Plan, `sm_push` (SM push)
    main    ag_attention_attend   the first `pushers` programs store own chunks in those ranks'
                              slots and announce each; then all attend
Keys come in a fixed order (weft.tiles.attention_gather): results are the same bits in every run.

Signals (SET to the call's epoch e, read on the device)
    rows_ready[src * chunks + c]  chunk c of src's k and v is in this rank's slot. By src, or by its
                                  copy engine; own ones by `take`, as what engines copy
    slot_free, epoch, ticket      the slot's; the last program of ag_attention_attend moves them
By `ce_push` one program waits for all signals before the slot is released: one that no tile needed
could otherwise come late and undo one of the next call's.

Not a program of the compiler: a tile meets a range of keys that is known at run time only, in
segments whose order depends on the rank, and two buffers arrive under one signal; Core IR maps rows
of results (docs/decisions/015-attention.md). Programs call this operator instead.

Limits  contiguous tensors; cu_seqlens is the same on all ranks and its numbers are not checked:
        they are on the device. Causal ranks have unequal work, the last one most of it, where
        they are not zigzag
Source  docs/decisions/009-hooks.md; ring attention (Liu et al. 2023) for keys that pass
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, ClassVar, Literal, overload

import torch

from weft.base import fields
from weft.base.card import UNFUSED, Op, Trial, calling, sized, trials
from weft.base.errors import ConfigError, ShapeError
from weft.base.target import Target
from weft.compiler import Shard, Tensor, frontend, layouts
from weft.ir.task import Program
from weft.ops import _baselines
from weft.plan import by_libraries, call_cache, described, operations, problems
from weft.plan.attention_launches import GatheredAttention
from weft.plan.choices import given_or_chosen
from weft.plan.sequence_shards import shards_of
from weft.runtime.world import World
from weft.tiles import attention_blocking

CE_PUSH, SM_PUSH = "ce_push", "sm_push"
SPARE_SMS = 1  # that the persistent grid leaves free: `take` runs beside it
KEYS = "tokens kv_heads d"
FORMS = {"q": "tokens q_heads d", "k": KEYS, "v": KEYS, "cu_seqlens": "starts"}
REFERENCE_ROWS = 4096  # scores of 128k keys are 2 GB then


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """All ranks at once, in fp32, sequence by sequence, head by head, REFERENCE_ROWS at a time."""
    q, k, v = (torch.cat([one[name] for one in inputs]).float() for name in "qkv")
    lie = [torch.arange(*problem.shard(rank)) for rank in range(problem.num_ranks)]
    if problem.zigzag:
        table = inputs[0]["cu_seqlens"]
        lie = _lie_zigzag(problem, None if table is None else table.cpu())
        order = torch.cat(lie).argsort().to(q.device)
        q, k, v = q[order], k[order], v[order]
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
    return [(out[own], lse[own]) for own in (one.to(q.device) for one in lie)]


def _lie_zigzag(problem: Problem, cu_seqlens: Any) -> list[torch.Tensor]:
    """Which tokens each rank has."""
    lie = shards_of(problem.m, problem.num_ranks, True, cu_seqlens, torch.device("cpu"))
    return [lie.positions(rank)[0] for rank in range(problem.num_ranks)]


@dataclass(frozen=True)
class Problem(problems.Rows):
    """m tokens over all ranks, n = kv_heads * d elements in each one's keys and in its values.

    `sequences`: how many cu_seqlens lists; 0: one of all tokens, and no cu_seqlens. `zigzag`: how
    each is split.
    """

    q_heads: int = 1
    kv_heads: int = 1
    d: int = 1
    causal: bool = True
    sequences: int = 0
    zigzag: bool = False

    op: ClassVar[str] = "ag_attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        attention_blocking.check_heads(self.op, self.q_heads, self.kv_heads, self.d)

    def shard(self, rank: int) -> tuple[int, int]:
        """Of tokens counted rank by rank."""
        if not self.zigzag:
            return super().shard(rank)
        some, more = divmod(self.m, self.num_ranks)
        first = rank * some + min(rank, more)
        return first, first + some + (rank < more)

    @property
    def gathered_rows(self) -> int:
        """Rows of a slot: each rank's begin at rank * `rows`."""
        return self.num_ranks * self.rows if self.zigzag else self.m

    @property
    def group(self) -> int:
        """Heads of q that share one of k."""
        return self.q_heads // self.kv_heads

    @property
    def k(self) -> int:
        """Products that are added up for an element of the result, at most."""
        return self.d + self.m

    @property
    def flops(self) -> int:
        """Of all ranks' mean, for one sequence; the last causal rank in order has nearly twice
        that."""
        pairs = self.m * self.m // (2 if self.causal else 1)
        return 4 * pairs * self.q_heads * self.d // self.num_ranks

    @property
    def memory_bytes(self) -> int:
        """What one rank must read and write at least."""
        return (2 * self.rows * self.q_heads * self.d + 2 * self.m * self.n) * self.itemsize


@dataclass(frozen=True)
class Config:
    """How a call is done; every field is the same on all ranks.

    Units   tile_m: rows of a tile, of (token, head) pairs; pack: heads that share one; tile_n:
            keys at a time; chunks: signals per shard; pushers: programs that store, `block`
            elements at a time, then attend
    """

    transport: str = CE_PUSH
    tile_m: int = 128
    tile_n: int = 64
    pack: int = 1
    num_warps: int = 8
    num_stages: int = 2
    chunks: int = 4
    pushers: int = 16
    block: int = 4096

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        op = problem.op
        fields.check_one_of(op, self, "transport", (CE_PUSH, SM_PUSH, UNFUSED))
        if self.transport == UNFUSED:
            return
        fields.check_powers_of_two(op, self, "tile_m", "tile_n", "block")
        fields.check_one_of(op, self, "num_warps", (1, 2, 4, 8, 16))
        most = programs_on(target)  # that wait for peers are all resident
        fields.check_ranges(op, self, num_stages=(1, 8), chunks=(1, 1024), pushers=(1, most))
        if self.transport == CE_PUSH and len(problem.nodes) > 1:
            raise ConfigError(
                f"{op}: transport={CE_PUSH!r} on {len(problem.nodes)} nodes; a copy engine reaches "
                f"the ranks of its own node only: take transport={SM_PUSH!r}"
            )
        if self.pack < 1 or problem.group % self.pack or self.pack > self.tile_m:
            raise ConfigError(
                f"{op}: pack={self.pack}; heads of a tile share their keys, so it must divide "
                f"{problem.group}, and be no more than tile_m={self.tile_m}"
            )
        cut = attention_blocking.Blocking(self.tile_m, self.tile_n, self.num_warps, self.num_stages)
        cut.check(op, problem.d, problem.itemsize, target)

    def grid(self, problem: Problem, target: Target) -> int:
        """Programs: all of them are resident."""
        tiles = ceil(problem.rows / (self.tile_m // self.pack)) * (problem.q_heads // self.pack)
        return min(max(tiles, self.pushers), programs_on(target))


def programs_on(target: Target) -> int:
    """How many programs may run at once."""
    return max(1, target.num_sms - SPARE_SMS)


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    cut = attention_blocking.forward(problem.d, problem.itemsize, target)
    # Where tokens fill no tile, heads do.
    is_packed = problem.rows < cut.m and problem.group <= cut.m
    pack = problem.group if is_packed else 1
    is_emulated = target.backend == "emu"
    pushers = min(2, target.num_sms) if is_emulated else min(16, programs_on(target))
    is_alone = len(problem.nodes) > 1 or target.num_sms <= SPARE_SMS or problem.num_ranks == 1
    for transport in (SM_PUSH,) if is_alone else (CE_PUSH, SM_PUSH):
        # Each chunk costs an engine's start.
        most = 2 if is_emulated else 4 if transport == CE_PUSH else 16
        chunks = min(max(1, problem.rows // (1 if is_emulated else 256)), most)
        yield Config(
            transport, cut.m, cut.n, pack, cut.num_warps, cut.num_stages, chunks, pushers,
            1024 if is_emulated else 4096,
        )  # fmt: skip


@overload
def ag_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, world: World, causal: bool = True,
    zigzag: bool = False, cu_seqlens: torch.Tensor | None = None, scale: float | None = None,
    m: int | None = None, config: Config | None = None, out: torch.Tensor | None = None,
    with_lse: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def ag_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, world: World, causal: bool = True,
    zigzag: bool = False, cu_seqlens: torch.Tensor | None = None, scale: float | None = None,
    m: int | None = None, config: Config | None = None, out: torch.Tensor | None = None,
    with_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def ag_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, world: World, causal: bool = True,
    zigzag: bool = False, cu_seqlens: torch.Tensor | None = None, scale: float | None = None,
    m: int | None = None, config: Config | None = None, out: torch.Tensor | None = None,
    with_lse: bool = False,
) -> Any:  # fmt: skip
    """Attend own queries over the keys and values of all ranks. Collective.

        out[t] = softmax over j of (scale * q[t] . k[j]) @ v,  j: of t's sequence; causal: j <= t

    Shapes  q: [own tokens, q_heads, d]; k, v: [own tokens, kv_heads, d]; out as q; all contiguous,
            q_heads a multiple of kv_heads, d from 1 to 256. m: tokens of all ranks, by default
            num_ranks * own ones: pass it where shards differ. cu_seqlens: int32[sequences + 1], the
            first token of each sequence and the end of the last, alike on all ranks; by default
            one sequence of all tokens. Tokens of none have out = 0, lse = -inf. zigzag: tokens are
            split as weft.layers.zigzag_split does
    Dtypes  all alike, float16, bfloat16 or float32; scores, sums and lse in fp32
    Units   scale is 1 / sqrt(d) by default; lse, returned as (out, lse) if asked for, is the
            natural logarithm, [own tokens, q_heads]
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded, and a
            replay goes by the cu_seqlens that are there then
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if operations.is_asked(q, k, v):
        found = operations.as_operation(
            Problem.op, world, (q, k, v), cu_seqlens=cu_seqlens, causal=causal, zigzag=zigzag,
            scale=scale, m=m, config=config, out=out,
        )  # fmt: skip
        return found if with_lse else found[0]
    given, rest = (q, k, v, cu_seqlens, out), (causal, zigzag, scale, m, config)
    call = call_cache.find_call(world, Problem.op, given, rest, _make_call)
    if out is not None:
        call_cache.check_apart(Problem.op, out, {"q": q, "k": k, "v": v})
    world.operator_call(call.name, call.tensors)
    if call.config.transport == UNFUSED and not call.problem.is_empty:
        made, lse = by_libraries.attention(world, call.problem, q, k, v, cu_seqlens, scale)
        out = made if out is None else out.copy_(made)
        return (out, lse) if with_lse else out
    if out is None:
        out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not call.problem.is_empty:
        call.launch(world, (q, k, v, out, lse, cu_seqlens))
    return (out, lse) if with_lse else out


def _make_call(
    world: World, q: Any, k: Any, v: Any, cu_seqlens: Any, out: Any, causal: bool, zigzag: bool,
    scale: float | None, m: int | None, config: Config | None,
) -> GatheredAttention:  # fmt: skip
    problem = problem_of(world, q, k, v, cu_seqlens, causal, zigzag, m)
    if out is not None:
        call_cache.check_out(Problem.op, out, q.shape, q.dtype, world)
    config = given_or_chosen(world, problem, config)
    return GatheredAttention(world, problem, config, scale)


def problem_of(
    world: World, q: Any, k: Any, v: Any, cu_seqlens: Any, causal: bool, zigzag: bool = False,
    m: int | None = None,
) -> Problem:  # fmt: skip
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens}
    sizes = layouts.bind_sizes(Problem.op, world, tensors, FORMS, {"cu_seqlens": torch.int32})
    starts, tokens, heads, d = (sizes.get(x, 1) for x in ("starts", "tokens", "kv_heads", "d"))
    if cu_seqlens is not None and starts < 2:
        message = f"cu_seqlens has shape ({starts},); it must be [sequences + 1], of one at least"
        raise ShapeError(f"{Problem.op}: {message}")
    problem = Problem(
        tokens * world.num_ranks if m is None else m, heads * d, world.num_ranks, str(q.dtype),
        problems.nodes_of(world), sizes["q_heads"], heads, d, causal, starts - 1, zigzag,
    )  # fmt: skip
    call_cache.check_shard(Problem.op, "q", tokens, problem, world)
    return problem


def make_problem(
    num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Problem:
    return sized(Problem, num_ranks, {**shape, "n": shape["kv_heads"] * shape["d"]}, dtype, nodes)


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, Any]:
    """One rank's random tensors, and lengths alike on all ranks: the same for one seed."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    first, end = problem.shard(rank)
    inputs: dict[str, Any] = {}
    for name, heads in (("q", problem.q_heads), ("k", problem.kv_heads), ("v", problem.kv_heads)):
        drawn = torch.randn(end - first, heads, problem.d, generator=generator)
        inputs[name] = drawn.to(problem.torch_dtype)
    lengths = None
    if problem.sequences:
        # Some are empty, some span ranks.
        alike = torch.Generator().manual_seed(seed)
        cuts = torch.randint(0, problem.m + 1, (problem.sequences - 1,), generator=alike)
        ends = torch.tensor([0, problem.m], device=cuts.device)
        lengths = torch.cat([ends[:1], cuts.sort().values, ends[1:]]).int()
    return {**inputs, "cu_seqlens": lengths}


run = calling(partial(ag_attention, with_lse=True), "causal", "zigzag", "m")


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> tuple[Any, Any]:
    """The result's shapes and dtypes, without values."""
    first, end = problem.shard(rank)
    out = torch.empty(end - first, problem.q_heads, problem.d, device="meta")
    return out.to(problem.torch_dtype), out[..., 0].contiguous()


def program_of(problem: Problem) -> Program:
    """The operator as a tensor program, of one sequence: programs know of no others."""

    def ag_attention(q, k, v):
        keys, values = frontend.all_gather(k), frontend.all_gather(v)
        return frontend.attention(q, keys, values, head=problem.d, causal=problem.causal)

    q, k = (
        Tensor(problem.dtype, ("m", heads * problem.d), Shard(0))
        for heads in (problem.q_heads, problem.kv_heads)
    )
    return frontend.trace(ag_attention, "tp", {"q": q, "k": k, "v": k})


SMALL = {
    "m": 40, "q_heads": 2, "kv_heads": 1, "d": 16, "sequences": 2, "causal": 1, "zigzag": 0
}  # fmt: skip
op = Op(
    name="ag_attention", problem=Problem, config=Config, make_problem=make_problem,
    summary="out = softmax(q @ all_gather(k)^T) @ all_gather(v), causal, of packed sequences",
    make_inputs=make_inputs, reference=reference, run=run, candidates=candidates,
    kernels=described.KernelsOf(run, make_inputs, candidates), fake=fake, takes_nodes=True,
    unfused=(Config(UNFUSED),),
    program=program_of,
    baselines=_baselines.AG_ATTENTION, backward=("all_gather", "reduce_scatter"),
    default_shape={**SMALL, "m": 128, "q_heads": 4, "kv_heads": 2, "d": 32},
    smallest={**SMALL, "m": 16, "sequences": 0}, smallest_config={"pushers": 1, "chunks": 1},
    trials=(
        *trials(SMALL),
        *(Trial((3,), {**SMALL, "causal": 0, "sequences": 0}, one) for one in (CE_PUSH, SM_PUSH)),
        *(Trial((3,), {**SMALL, "zigzag": 1}, one) for one in (CE_PUSH, SM_PUSH)),
        # Signals of chunks without rows, which no tile waits for, are copied late.
        Trial((3,), {**SMALL, "causal": 0}, CE_PUSH, calls=(2, 0, 2, 0, 2, 0)),
        # Inputs change as soon as a call is over.
        Trial((2,), SMALL, CE_PUSH, on_heap=True),
    ),
    awkward_shapes=(
        (4, {**SMALL, "m": 97, "sequences": 5}),
        (3, {**SMALL, "m": 67, "q_heads": 6, "kv_heads": 2, "d": 20, "causal": 0}),
        (2, {**SMALL, "m": 1, "sequences": 1}), (1, {**SMALL, "m": 40, "sequences": 0}),
        (4, {**SMALL, "m": 9}), (4, {**SMALL, "m": 0, "sequences": 1}),
        (3, {**SMALL, "m": 67, "sequences": 4, "zigzag": 1}),
        (4, {**SMALL, "m": 35, "sequences": 0, "zigzag": 1, "causal": 0}),
    ),
)  # fmt: skip
