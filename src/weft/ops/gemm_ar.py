"""GEMM, then all-reduce, as one operator: out = sum over ranks (A[m, k] @ B[k, n]), on every rank.

Every rank has all m rows of A and a part of k. Rows belong to ranks, as torch.chunk splits them:
the owner sums a tile and hands it to all, so every rank gets the same bits. Sums are in fp32; other
ranks' shares travel in the result's dtype, and are added in the order owner + 1, + 2, ...

Plan, `push`: one kernel on each rank, the GEMM template with the hooks of gemm_rs, and
    emit      an own tile -> out, and -> every other rank's `gathered`
    announce  tells all of them
    then      the other ranks' tiles, as they come: gathered -> out
Plan, `one_shot` and `two_shot`, for few rows: _gemm_ar_few.py, which see.
Plan, `all_reduce` and `nccl`: cuBLAS, then weft's own or the library's; nothing is fused.

Signals (all are SET to the call's epoch e, read on the device)
    partials_ready[tile, part, src]   as gemm_rs
    sums_ready[tile, part, owner]     the owner's sums of this tile, or of this part of it, are in
                                      `gathered` here. By the owner; own ones are set and not read
    summed, slot_free, epoch, ticket  as gemm_rs
Tiles without rows are signalled too.

Limits  those of gemm_rs
Source  the design's section 4; two-shot all-reduce, tile by tile
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from weft.base.card import Op, Trial, trials
from weft.base.dtypes import DTYPES
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.ir import core
from weft.ops import _baselines, _by_library, _gemm_ar_few, _lanes, _operations, _products
from weft.ops.all_reduce import all_reduce
from weft.runtime.world import World

# Rows up to which packets carry tiles in the product's launch. On 2 x H200, recorded, four layers,
# that takes 0.88 to 0.93 of what cuBLAS and weft's all-reduce take at 1 row, 0.80 to 0.91 at 16,
# 0.89 to 1 at 64 and over twice as long at 256. To all ranks, not to an owner and back, while rows
# times peers are so few: 1 to 1.5 us less at 16 rows of two ranks, 1 to 4 us more at 64.
FEW_ROWS, ONE_SHOT_ROWS = 64, 16
# A rank's rows from which tiles are filled.
FUSED_ROWS = 256


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32."""
    total = _products.total(inputs)
    return [total for _ in inputs]


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_products.Problem):
    """m rows, n columns, and k of each rank; every rank's result is all of it."""

    op = "gemm_ar"

    def result_rows(self, rank: int) -> tuple[int, int]:
        return 0, self.m


@dataclass(frozen=True)
class Config(_products.Config):
    """`transport` as the Plan says."""

    op = "gemm_ar"
    unfused = ("all_reduce",)
    by_packets = ("one_shot", "two_shot")


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    few = list(_by_packets(problem, target))
    # What the last own tiles sum is not hidden: few of them.
    many = [replace(config, last=1) for config in _products.fused(Config, problem, target)]
    unfused = [Config(transport="all_reduce")]
    if target.backend == "emu":
        order = (few, many, unfused) if problem.m <= FEW_ROWS else (many, few, unfused)
    elif len(problem.nodes) > 1 or problem.m <= FEW_ROWS:
        order = (few, unfused, many)  # between nodes there are no few
    else:
        order = (unfused, many) if problem.rows < FUSED_ROWS else (many, unfused)
    for kind in order:
        yield from kind
    if target.backend == "cuda" and problem.is_even:
        yield Config(transport=_products.LIBRARY)


def _by_packets(problem: Problem, target: Target) -> Iterator[Config]:
    """The ways for few rows, where all ranks are near."""
    if problem.is_empty or len(problem.nodes) > 1:
        return
    cut = asdict(_gemm_ar_few.cut_of(problem, target))
    is_one_shot = problem.m * (problem.num_ranks - 1) <= ONE_SHOT_ROWS
    ways = ("one_shot", "two_shot") if is_one_shot else ("two_shot", "one_shot")
    for transport in ways:
        yield Config(transport=transport, **cut)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The program

# Hooks of the GEMM template; its kernels, plain and for Hopper, are composed of this
# (docs/composed_kernels.md).
KERNEL = core.parse("""\
program(gemm_ar_multiply)
a = param(operand)
b = param(operand)
c = param(operand, by='own rows of out')
out = param(pointer)
partials = param(pointer)
gathered = param(pointer)
partials_ready = param(signals, by=kernel, to=kernel, announces=(partials,))
sums_ready = param(signals, by=kernel, to=kernel, announces=(gathered,))
slot = param(slot, by=kernel, to=kernel)
world = param(world)
parts = mapping(static, (a,), cuts=part)
template(gemm, (128, 128, 64), formula='out = all_reduce(a @ b)')
credit(begin, slot)
hook(order, scatter, (parts,))
hook(ready, read_owned, (a, parts))
wait(combine, partials_ready, others, parts)
hook(combine, add_partials, (partials, parts))
hook(emit, store_own, (c, parts))
hook(emit, spread, (gathered, parts))
hook(emit, push, (partials, parts))
notify(announce, sums_ready, all, parts)
notify(announce, partials_ready, owner, parts)
wait(collect, sums_ready, tile, parts)
hook(collect, unpack, (gathered, out, parts))
finish(end, slot)
""")
ARRAYS = ("partials", "gathered", "partials_ready", "sums_ready")
PROGRAM = _products.Program(core.require(KERNEL), ARRAYS, takes_out=True)


# ---------------------------------------------------------------------------------------------
# The host


def gemm_ar(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    world: World,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of all ranks' products, the same bits on every rank. Collective.

        out = a of rank 0 @ b of rank 0 + a of rank 1 @ b of rank 1 + ...

    Shapes  a: [m, k], contiguous; b: [k, n], contiguous or a transposed [n, k]; out: [m, n]
    Dtypes  all alike, float16, bfloat16 or float32; sums in fp32, other ranks' shares rounded once
    Sync    stream-ordered on the current stream; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if _operations.is_asked(a, b):
        return _operations.as_operation("gemm_ar", world, (a, b), config=config, out=out)
    call = _lanes.find_call(world, "gemm_ar", (a, b, out), (config,), _make_call)
    if out is None:
        out = torch.empty(call.out_shape, dtype=a.dtype, device=a.device)
    else:
        increment_version((out,))
    world.operator_call(call.name, call.tensors)
    if call.is_empty:
        return out.zero_()
    if call.is_fused:
        call.run(world, a, b, out)
    elif call.config.transport == _products.LIBRARY:
        torch.mm(a, b, out=out)
        _by_library.all_reduce(world, out, out)
    else:
        all_reduce(call.product(world, a, b), world=world, out=out)
    return out


def _make_call(world: World, a: Any, b: Any, out: Any, config: Any) -> _products.Call:
    problem = _products.problem_of(Problem, world, a, b, out)
    config = config or choose(problem, world.target)
    config.check(problem, world.target)
    if config.transport in Config.by_packets:
        return _gemm_ar_few.FewCall(world, problem, config)
    buffers = {
        "partials": ((problem.num_ranks, problem.rows, problem.n), problem.torch_dtype),
        "gathered": ((problem.num_ranks, problem.rows, problem.n), problem.torch_dtype),
    }
    words = config.num_words(problem, world.target)
    signals = {"partials_ready": (words, torch.int64), "sums_ready": (words, torch.int64)}
    return _products.Call(world, problem, config, PROGRAM, buffers, signals)


# ---------------------------------------------------------------------------------------------
# The card


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    return gemm_ar(inputs["a"], inputs["b"], world=world, config=config)


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or next(_products.fused(Config, problem, target))
    config.check(problem, target)
    if config.transport in Config.by_packets:
        yield _gemm_ar_few.record(problem, config, target)
    elif config.is_fused:
        element = f"*{DTYPES[problem.dtype].triton}"
        arrays = dict(zip(ARRAYS, (element, element, "*i64", "*i64"), strict=True))
        yield _products.record(problem, config, target, PROGRAM, arrays)


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """The result's shape and dtype, without its values."""
    return torch.empty((problem.m, problem.n), dtype=problem.torch_dtype, device="meta")


op = Op(
    name="gemm_ar",
    summary="out = sum(A[m, k] @ B[k, n] over ranks), on every rank",
    problem=Problem,
    config=Config,
    make_problem=partial(_products.make_problem, Problem),
    make_inputs=_products.make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=kernels,
    default_shape={"m": 256, "n": 256, "k": 256},
    smallest={"m": 32, "n": 16, "k": 16},
    trials=(
        *trials({"m": 56, "n": 24, "k": 16}),
        # More tiles than one to a rank, of which the last has no rows.
        Trial((2,), {"m": 70, "n": 40, "k": 16}, _products.PUSH),
        # Steps of k enough for programs to share tiles, their first as well as their last.
        Trial((2,), {"m": 20, "n": 40, "k": 80}, "one_shot"),
        Trial((2,), {"m": 20, "n": 40, "k": 80}, "two_shot"),
    ),
    awkward_shapes=(
        (4, {"m": 100, "n": 96, "k": 64}),
        (3, {"m": 91, "n": 70, "k": 50}),
        (2, {"m": 2, "n": 64, "k": 64}),
        (1, {"m": 40, "n": 48, "k": 32}),
        (4, {"m": 1, "n": 32, "k": 32}),
        (4, {"m": 9, "n": 16, "k": 16}),
        (4, {"m": 0, "n": 16, "k": 16}),
    ),
    baselines=_baselines.GEMM_AR,
    fake=fake,
    backward=(),
    takes_nodes=True,
    composed=Config.unfused,
)
