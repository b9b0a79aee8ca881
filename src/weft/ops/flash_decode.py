"""Distributed flash-decode: one query a sequence; all ranks have parts of its keys and values.

    out[b, h, :] = softmax over j of (q[b, h, :] . k[b, j, g, :] * scale) @ v[b, j, g, :]

over all keys of all ranks, with g = h // (heads / kv_heads). Every rank has, for each sequence,
lengths[b] keys and values of its own, of all heads, in any number; every rank passes the same
queries, and gets all of out, the same bits everywhere. Which keys a rank has does not matter:
softmax knows no order.

Plan: one kernel on each rank
    attend   own keys, in splits (weft.tiles.attention_decode) -> for each sequence and head of the
             cache the mean of the values and the log of the sum of weights, lse, both in fp32
    send     both -> every rank, this one too
    merge    all ranks' parts, in the order of ranks: mean of means, weighted by exp(lse)
A rank without keys of a sequence sends zeros and an lse of -inf, which weighs nothing; where no
rank has any, out is zeros. Sums are in fp32, in a fixed order; out is rounded once.

    ll       LL packets: data and flag in one 8-byte store; no signal, no fence: for few heads
    sm_push  SM push to the other ranks' slots, then a signal for each tile

Signals
    boxes[2, ..]         ll, flagged with the call's epoch e, in two halves that calls use in
                         turns. Every rank sends every tile to every rank: a rank that has ended a
                         call knows that all have begun it, and so ended the one before. No credit
    ready[tile, src]     sm_push: the tile of src is here; SET to e. By src
    come                 local: counts the splits of a tile that are there  (attention_decode)
    slot_free, epoch, ticket   the slot's; the last program moves them

Not a program of the compiler: the length of the contraction is data on the device, other on each
rank, and the split-k partials of a tile are merged by weights, not added
(docs/decisions/019-parts-that-merge-by-weight.md). Hooks and kernel are in
weft.tiles.attention_merge.

Limits  tensors are contiguous; d up to 256; ll needs all ranks on one node
Source  flash-decode (Dao et al. 2023); its split over ranks: Triton-distributed (ByteDance 2025)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.base import fields
from weft.base.card import UNFUSED, Op, Trial, calling
from weft.base.errors import ConfigError
from weft.base.target import Target
from weft.compiler import layouts
from weft.ops import _baselines
from weft.plan import by_libraries, call_cache, described, operations, problems, tuning_table
from weft.plan.attention_launches import MergedDecode
from weft.plan.choices import given_or_chosen
from weft.runtime.world import World
from weft.tiles import attention_blocking, attention_decode

LL, SM_PUSH = "ll", "sm_push"
FORMS = {
    "q": "batch heads d", "k_cache": "rows page kv_heads d", "v_cache": "rows page kv_heads d",
    "lengths": "batch", "block_table": "batch width",
}  # fmt: skip


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """All ranks at once: one softmax over the keys of all, in fp32, rounded once."""
    q = inputs[0]["q"].float()
    out = torch.zeros_like(q)
    for b in range(problem.m):
        parts = [(one, int(one["lengths"][b])) for one in inputs]
        keys, values = (
            torch.cat([one[name][b, :length].float() for one, length in parts])
            for name in ("k_cache", "v_cache")
        )
        if len(keys):
            grouped = q[b].reshape(problem.kv_heads, problem.group, problem.k)
            scores = torch.einsum("ghd,jgd->ghj", grouped, keys) * problem.scale
            mean = torch.einsum("ghj,jgd->ghd", scores.softmax(-1), values)
            out[b] = mean.reshape(problem.heads, problem.k)
    out = out.to(problem.torch_dtype)
    return [out.clone() for _ in inputs]


@dataclass(frozen=True)
class Problem(problems.Rows):
    """m queries of `heads` heads of k elements; on every rank caches of n keys a sequence.

    `variable`: lengths are any numbers up to n, not all n: of inputs alone, which are made by it.
    `page` keys lie together, of a cache in pages; 0 is one without.
    """

    k: int = 64
    heads: int = 8
    kv_heads: int = 8
    variable: bool = True
    page: int = 0

    op = "flash_decode"

    def __post_init__(self) -> None:
        super().__post_init__()
        attention_blocking.check_heads(self.op, self.heads, self.kv_heads, self.k)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        return self.k**-0.5

    @property
    def partial_bytes(self) -> int:
        """What a rank sends to each other one."""
        return self.m * self.heads * (self.k + 1) * 4

    @property
    def flops(self) -> int:
        """Of one rank with full caches."""
        return 4 * self.m * self.heads * self.n * self.k


@dataclass(frozen=True)
class Config:
    """`transport` as the Plan says. Units  tile_m: query heads at a time, of those that share a
    head of the cache; tile_n: keys at a time; splits: of each sequence's keys"""

    transport: str = LL
    tile_m: int = 16
    tile_n: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem"""
        op = problem.op
        fields.check_one_of(op, self, "transport", (LL, SM_PUSH, UNFUSED))
        fields.check_powers_of_two(op, self, "tile_m", "tile_n")
        fields.check_one_of(op, self, "num_warps", (1, 2, 4, 8, 16))
        fields.check_ranges(op, self, num_stages=(1, 8), splits=(1, 1 << 16))
        if self.transport == LL and len(problem.nodes) > 1:
            raise ConfigError(
                f"{op}: transport={LL!r} reaches into peers' memory, but the world has "
                f"{len(problem.nodes)} nodes; take {SM_PUSH!r}"
            )

    def tiles(self, problem: Problem) -> int:
        return problem.m * problem.heads // attention_decode.pack_of(problem.group, self.tile_m)

    def grid(self, problem: Problem, target: Target) -> int:
        """Programs, which wait for other ranks': all of them are resident."""
        most = 3 if target.backend == "emu" else target.num_sms
        return max(1, min(self.tiles(problem) * self.splits, most, target.num_sms))


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    # A rank's message to each other one is as long as those of one-shot packets then.
    ranks = problem.num_ranks
    first = tuning_table.rows_for("all_reduce", problem.partial_bytes, num_ranks=ranks)[0]
    ways = (LL, SM_PUSH) if first.transport == "one_shot_ll" else (SM_PUSH, LL)
    for transport in ways if len(problem.nodes) == 1 else (SM_PUSH,):
        cut = attention_blocking.decode(
            problem.k, problem.group, problem.itemsize, target, by_packets=transport == LL
        )
        one = Config(transport, cut.m, cut.n, 2, **cut.options)
        if target.backend != "emu":
            splits = attention_blocking.splits_of(one.tiles(problem), target.num_sms, problem.n)
            one = replace(one, splits=splits)
        yield one


def flash_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor, *,
    world: World, scale: float | None = None, block_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None, config: Config | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of one query a sequence over the keys that all ranks have of it. Collective.

        out[b, h, :] = softmax over all keys of all ranks (q[b, h, :] . k * scale) @ v

    Shapes  q, out: [batch, heads, d], q the same on all ranks; k_cache, v_cache: [batch, max_kv,
            kv_heads, d], or [pages, page, kv_heads, d] with block_table: [batch, width], of which
            the first entries are each sequence's pages. lengths: [batch], keys that this rank has,
            0 up to max_kv, or page * width; more than that are not there. All contiguous
    Dtypes  float16, bfloat16 or float32, all alike; lengths and block_table int32. Sums in fp32
    Units   scale: of scores, 1 / sqrt(d) when None
    Sync    stream-ordered on the current stream; can be recorded; lengths are read on the device
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    given = (q, k_cache, v_cache)
    scale = None if scale is None else float(scale)
    if operations.is_asked(*given):
        return operations.as_operation(
            "flash_decode", world, (*given, lengths), scale=scale, block_table=block_table,
            out=out, config=config,
        )  # fmt: skip
    tensors = (*given, lengths, block_table)
    call = call_cache.find_call(world, "flash_decode", tensors, (scale, config), _make_call)
    if out is None:
        out = torch.empty_like(q)
    else:
        call_cache.check_out("flash_decode", out, q.shape, q.dtype, world)
        call_cache.check_apart("flash_decode", out, dict(zip(FORMS, tensors)))
    world.operator_call(call.name, call.tensors)
    if call.problem.m and call.config.transport == UNFUSED:
        out.copy_(by_libraries.decode(world, call.problem, *tensors, call.scale))
    elif call.problem.m:
        call.launch(world, (*tensors, out))
    return out


def _make_call(
    world: World, q: Any, k_cache: Any, v_cache: Any, lengths: Any, block_table: Any,
    scale: float | None, config: Config | None,
) -> MergedDecode:  # fmt: skip
    problem = problem_of(world, q, k_cache, v_cache, lengths, block_table)
    config = given_or_chosen(world, problem, config)
    return MergedDecode(world, problem, config, problem.scale if scale is None else scale)


def problem_of(
    world: World, q: Any, k_cache: Any, v_cache: Any, lengths: Any, block_table: Any = None
) -> Problem:
    """The problem that these tensors are.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    given = (q, k_cache, v_cache, lengths, block_table)
    tensors = dict(zip(FORMS, given, strict=True))
    # Without pages each sequence has its own rows of the cache.
    cache = {} if block_table is not None else dict.fromkeys(
        ("k_cache", "v_cache"), "batch page kv_heads d"
    )  # fmt: skip
    integers = dict.fromkeys(("lengths", "block_table"), torch.int32)
    sizes = layouts.bind_sizes(Problem.op, world, tensors, {**FORMS, **cache}, integers)
    page = sizes["page"]
    return Problem(
        sizes["batch"], page * sizes.get("width", 1), world.num_ranks, str(q.dtype),
        problems.nodes_of(world), sizes["d"], sizes["heads"], sizes["kv_heads"],
        page=0 if block_table is None else page,
    )  # fmt: skip


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random tensors: the same for one seed on every machine. q is all ranks'."""
    shared = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed((seed + 1) * problem.num_ranks + rank)
    batch, rows, page = problem.m, problem.m, problem.n
    pages = {}
    if problem.page:
        rows, page = batch * problem.n // problem.page, problem.page
        pages["block_table"] = torch.arange(rows).to(torch.int32).reshape(batch, -1)
    cache = (rows, page, problem.kv_heads, problem.k)
    q = torch.randn((batch, problem.heads, problem.k), generator=shared).to(problem.torch_dtype)
    k_cache = torch.randn(cache, generator=own).to(problem.torch_dtype)
    v_cache = torch.randn(cache, generator=own).to(problem.torch_dtype)
    if problem.variable:
        lengths = torch.randint(0, problem.n + 1, (batch,), generator=own)
    else:
        lengths = torch.full((batch,), problem.n, device=q.device)
    lengths = lengths.to(torch.int32)
    return {"q": q, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths, **pages}


run = calling(flash_decode)


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """The result's shape and dtype, without its values."""
    shape = (problem.m, problem.heads, problem.k)
    return torch.empty(shape, dtype=problem.torch_dtype, device="meta")


SMALL = {"m": 3, "n": 40, "k": 16, "heads": 2, "kv_heads": 1, "variable": 1}
op = Op(
    name="flash_decode",
    summary="attention of one query a sequence over keys that all ranks have parts of",
    problem=Problem,
    config=Config,
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    unfused=(Config(UNFUSED),),
    kernels=described.KernelsOf(run, make_inputs, candidates),
    default_shape={"m": 4, "n": 64, "k": 32, "heads": 8, "kv_heads": 2, "variable": 1},
    smallest={"m": 1, "n": 20, "k": 16, "heads": 2, "kv_heads": 1},
    smallest_config={"splits": 1},
    trials=(
        *(Trial(nodes, SMALL) for nodes in ((3,), (2, 1))),
        # Programs merge many tiles each, so a rank that is a call ahead meets them.
        Trial((2,), {**SMALL, "m": 12, "n": 4}, SM_PUSH, calls=(0, 0, 0)),
    ),
    awkward_shapes=(
        (4, {"m": 5, "n": 37, "k": 24, "heads": 6, "kv_heads": 2, "variable": 1}),
        (3, {"m": 1, "n": 1, "k": 1, "heads": 1, "kv_heads": 1, "variable": 0}),
        (2, {"m": 3, "n": 0, "k": 16, "heads": 4, "kv_heads": 4, "variable": 1}),
        (1, {"m": 2, "n": 90, "k": 64, "heads": 20, "kv_heads": 1, "variable": 1}),
        (8, {"m": 2, "n": 9, "k": 32, "heads": 8, "kv_heads": 8, "variable": 1}),
        (4, {"m": 0, "n": 16, "k": 16, "heads": 2, "kv_heads": 2, "variable": 1}),
    ),
    baselines=_baselines.FLASH_DECODE,
    fake=fake,
    takes_nodes=True,
)
