"""GEMM, then all-reduce, as one operator: out = sum over ranks (A[m, k] @ B[k, n]), on every rank.

Every rank has all m rows of A and a part of k. Rows belong to ranks, as torch.chunk splits them:
the owner sums a tile and hands it to all, so every rank gets the same bits. Sums are in fp32; other
ranks' shares travel in the result's dtype, and are added in the order owner + 1, + 2, ...

Plan    the compiler's, of `gemm_ar` below (`weft explain gemm_ar`). sm_push: as gemm_rs, and the
        owner stores the sums of a tile to all ranks; relay: as gemm_rs, then weft's all_gather;
        one_shot_ll, two_shot_ll, for small m: LL packets carry tiles (tiles/gemm_packets.py);
        all_reduce, nccl: cuBLAS, then weft's or NCCL's all-reduce
Signals the plan's: a word for each own tile and source, and one for each tile of another owner
Limits  those of gemm_rs; packets take no fp8 operands
Source  the design's section 4; two-shot all-reduce, tile by tile
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import torch

from weft.base.card import Op, Trial, trials
from weft.base.target import Target
from weft.compiler import frontend, schedules
from weft.compiler.buckets import by_bucket
from weft.compiler.schedules import LIBRARY, RELAY, SM_PUSH, Config, by_packets, reducing
from weft.ops import _baselines
from weft.ops.all_reduce import Problem as AllReduce
from weft.plan import operations, scales, summed
from weft.plan.call_cache import by_layout, find_call
from weft.plan.choices import given_or_chosen
from weft.runtime.world import World

# Rows up to which packets carry tiles in the product's launch (2 x H100, recorded, four layers:
# 0.88 to 0.95 of cuBLAS's and weft's all-reduce's time at 16 rows, as long at 32, 1.08 to 1.3 times
# at 64); and rows times peers up to which they go to all ranks at once, 1 to 1.5 us less.
SMALL_M = 16
# A rank's rows, and rounds of tiles of 128 x 128, from which sums hide behind products (2 x H200,
# m 512: unfused in 1.0 to 1.12 of the time from 1.9 rounds on, in 0.94 and 0.98 of it below).
FUSED_ROWS, ROUNDS = 256, 1.5
UNFUSED = "all_reduce"


def program(a: Any, b: Any, dtype: str, scaling: str) -> Any:
    return frontend.all_reduce(frontend.matmul(a, b, dtype=dtype, scaling=scaling))


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32."""
    return [summed.total(problem, inputs)] * len(inputs)


class Problem(summed.Problem):
    """m rows, n columns, and k of each rank; every rank's result is all of it."""

    op = "gemm_ar"
    transports = (SM_PUSH, RELAY, "one_shot_ll", "two_shot_ll", UNFUSED, LIBRARY)
    program, unfused = staticmethod(program), AllReduce

    def result_rows(self, rank: int) -> tuple[int, int]:
        return 0, self.m


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    small = by_packets(problem, target, SMALL_M)
    # What the last own tiles sum is not hidden: few of them.
    large = [replace(config, last=1) for config in reducing(problem, target)]
    unfused = schedules.unfused(problem, target)
    rounds = ceil(problem.m / 128) * ceil(problem.n / 128) / target.num_sms
    hides = problem.rows >= FUSED_ROWS and rounds >= ROUNDS
    is_emulated = target.backend == "emu"
    pays = (hides or is_emulated) and schedules.may_pay(problem, target)
    order = (large, unfused) if pays else (unfused, large)
    if problem.m <= SMALL_M or is_emulated:
        order = (small, *order) if problem.m <= SMALL_M else (*order, small)
    for kind in order:
        yield from kind
    if problem.can_use_library(target):
        yield Config(transport=LIBRARY)


@by_bucket
def choose(problem: Problem, target: Target, is_recorded: bool = False) -> Config:
    return next(candidates(problem, target))


def gemm_ar(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    world: World,
    config: Config | None = None,
    out: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of all ranks' products, the same bits on every rank. Collective.

        out = a of rank 0 @ b of rank 0 + a of rank 1 @ b of rank 1 + ...

    Shapes  a: [m, k], contiguous; b: [k, n], contiguous or a transposed [n, k]; out: [m, n]
    Dtypes  as gemm_rs's, scales of fp8 operands too; sums in fp32, other ranks' shares rounded once
    Sync    stream-ordered on the current stream; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if operations.is_asked(a, b):
        rest = {"scale_a": scale_a, "scale_b": scale_b, "config": config, "out": out}
        return operations.as_operation("gemm_ar", world, (a, b), **rest)
    tensors = (a, b, out, scale_a, scale_b)
    call = find_call(world, "gemm_ar", tensors, (config,), _make_call, by_layout)
    given = {"a": a, "b": b} if scale_a is None else scales.named(a, b, scale_a, scale_b)
    return call(out, **given)


def _make_call(
    world: World, a: Any, b: Any, out: Any, scale_a: Any, scale_b: Any, config: Any
) -> summed.Call:
    problem = problem_of(world, a, b, out, scale_a, scale_b)
    chosen = given_or_chosen(world, problem, config)
    return summed.Call(world, problem, chosen, scales.named(a, b, scale_a, scale_b))


problem_of = partial(summed.problem_of, Problem)
run = summed.calling(gemm_ar)

op = Op(
    name="gemm_ar",
    summary="out = sum(A[m, k] @ B[k, n] over ranks), on every rank",
    problem=Problem,
    reference=reference,
    candidates=candidates,
    choose=choose,
    trials=(
        *trials({"m": 56, "n": 24, "k": 16}),
        # More tiles than one to a rank, of which the last has no rows.
        Trial((2,), {"m": 70, "n": 40, "k": 16}, SM_PUSH),
        # Steps of k enough for programs to share tiles, their first as well as their last.
        *(Trial((2,), {"m": 20, "n": 40, "k": 80}, one) for one in ("one_shot_ll", "two_shot_ll")),
    ),
    awkward_shapes=((4, {"m": 100, "n": 96, "k": 64}), (3, {"m": 91, "n": 70, "k": 50}),
                    *summed.AWKWARD_SHAPES),
    baselines=_baselines.GEMM_AR,
    backward=(), composed=(RELAY, UNFUSED),
    **summed.card(Problem, run),
)  # fmt: skip
