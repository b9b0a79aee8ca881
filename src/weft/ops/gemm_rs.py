"""GEMM, then reduce-scatter, as one operator: out = own rows of sum over ranks (A[m, k] @ B[k, n]).

Every rank has all m rows of A and a part of k, and gets the sums of its shard of the rows, which
are split as torch.chunk splits them: shards may be ragged, or empty. Sums are in fp32; other ranks'
shares travel in the result's dtype, and are added in the order rank + 1, + 2, ...

Plan    the compiler's, of `gemm_rs` below (`weft explain gemm_rs`): tiles of the other ranks' rows
        come first and travel beneath the products behind them; own ones last, which add the others'
        shares. sm_push: SMs store tiles to their owner; relay: other nodes' to a partner on this
        one, from where one sum crosses, by a kernel beside it; ce_push, and recorded ce_parts: copy
        engines carry chunks of columns; reduce_scatter, nccl: cuBLAS, then weft's or the library's
Signals the plan's: a word for each own tile and source, or for each chunk that engines carry
Limits  A is row-major and has the same m and k's dtype on all ranks; B is [k, n] or a transposed
        [n, k]; the template for Hopper needs one node or relays, and of fp8 b as [n, k]
Source  the design's section 4; FLUX for the order
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from weft.base.card import Op, Trial, trials
from weft.base.target import Target
from weft.compiler import frontend, schedules
from weft.compiler.buckets import by_bucket
from weft.compiler.schedules import CE_PARTS, CE_PUSH, LIBRARY, RELAY, SM_PUSH, Config, predict
from weft.ops import _baselines
from weft.ops.reduce_scatter import Problem as ReduceScatter
from weft.plan import operations, scales, summed
from weft.plan.call_cache import by_layout, find_call
from weft.plan.choices import given_or_chosen
from weft.plan.runner import is_as_recorded
from weft.runtime.world import World

# Rows of a rank that fill tiles (2 x H200, 256 rows, n 8192, k 2048: 52 us, unfused 54).
FUSED_ROWS, UNFUSED = 128, "reduce_scatter"
CHUNKS = {0: {"chunks": 2}, 2: {"chunks": 1}}  # by size


def program(a: Any, b: Any, dtype: str, scaling: str) -> Any:
    return frontend.reduce_scatter(frontend.matmul(a, b, dtype=dtype, scaling=scaling))


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32."""
    total = summed.total(problem, inputs)
    return [total[slice(*problem.shard(rank))] for rank in range(problem.num_ranks)]


class Problem(summed.Problem):
    """m rows over all ranks, n columns and k of each rank; a rank's result is its shard."""

    op = "gemm_rs"
    transports = (SM_PUSH, RELAY, CE_PUSH, CE_PARTS, UNFUSED, LIBRARY)
    program, unfused = staticmethod(program), ReduceScatter

    def result_rows(self, rank: int) -> tuple[int, int]:
        return self.shard(rank)


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    kinds = [schedules.fused(problem, target), schedules.unfused(problem, target)]
    is_small = problem.rows < FUSED_ROWS and target.backend != "emu"
    for kind in reversed(kinds) if is_small or not schedules.may_pay(problem, target) else kinds:
        yield from kind
    if problem.can_use_library(target):
        yield Config(transport=LIBRARY)


@by_bucket
def choose(problem: Problem, target: Target, is_recorded: bool = False) -> Config:
    """What nothing was measured of: engines that begin within a kernel cannot be recorded, and have
    what recorded launches in parts need."""
    refused = {CE_PUSH, CE_PARTS} if is_recorded else {CE_PARTS}
    if is_recorded and choose(problem, target).transport == CE_PUSH:
        refused.remove(CE_PARTS)
    way = next(one for one in candidates(problem, target) if one.transport not in refused)
    us = predict(problem, target, way) if way.is_fused else None
    pays = schedules.pays(us, problem, target, UNFUSED, is_recorded)
    return way if pays else Config(transport=UNFUSED)


def gemm_rs(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    world: World,
    config: Config | None = None,
    out: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' products. Collective.

        out = (a of rank 0 @ b of rank 0 + a of rank 1 @ b of rank 1 + ...)[rows of this rank]

    Shapes  a: [m, k], contiguous; b: [k, n], contiguous or a transposed [n, k]; out: [rows of this
            rank, n], rows split as torch.chunk splits m; scales, each rank's own, as ag_gemm's
    Dtypes  all alike, float16, bfloat16 or float32; or a and b of fp8, scales float32, out bfloat16
            unless given (ag_gemm); sums in fp32, other ranks' shares rounded once, as out is
    Sync    stream-ordered on the current stream; can be recorded, but not with config= of
            transport="ce_push": without config= recorded calls, and all calls under
            torch.use_deterministic_algorithms, take another
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
            UsageError: a configuration that cannot be recorded
    """
    if operations.is_asked(a, b):
        rest = {"scale_a": scale_a, "scale_b": scale_b, "config": config, "out": out}
        return operations.as_operation("gemm_rs", world, (a, b), **rest)
    rest = (config is None and is_as_recorded(world), config)
    call = find_call(world, "gemm_rs", (a, b, out, scale_a, scale_b), rest, _make_call, by_layout)
    given = {"a": a, "b": b} if scale_a is None else scales.named(a, b, scale_a, scale_b)
    return call(out, **given)


def _make_call(
    world: Any, a: Any, b: Any, out: Any, scale_a: Any, scale_b: Any, is_recorded: bool, config: Any
) -> summed.Call:
    problem = problem_of(world, a, b, out, scale_a, scale_b)
    chosen = given_or_chosen(world, problem, config, is_recorded)
    is_free = config is None and not is_recorded
    other = given_or_chosen(world, problem, None, True) if is_free else None
    return summed.Call(world, problem, chosen, scales.named(a, b, scale_a, scale_b), other)


problem_of = partial(summed.problem_of, Problem)
run = summed.calling(gemm_rs)

op = Op(
    name="gemm_rs",
    summary="out = rows of this rank of sum(A[m, k] @ B[k, n] over ranks)",
    problem=Problem, reference=reference,
    candidates=candidates, choose=choose, predict=predict, baselines=_baselines.GEMM_RS,
    records_as=lambda one, to: to.transport != CE_PUSH and (one.transport == CE_PUSH or one == to),
    trials=(
        *trials({"m": 56, "n": 24, "k": 16}),
        # A rank's last tile has no rows; words may be those of another chunk of the next call.
        Trial((2,), {"m": 70, "n": 40, "k": 16}, SM_PUSH),
        *(Trial((3,), {"m": 56, "n": 32, "k": 16}, by, calls=(2, 0) * 3, configs=CHUNKS)
          for by in (CE_PUSH, CE_PARTS)),
    ),
    awkward_shapes=((4, {"m": 388, "n": 96, "k": 64}), (3, {"m": 291, "n": 70, "k": 50}),
                    *summed.AWKWARD_SHAPES),
    backward=("ag_gemm", "ag_wgrad"), composed=(UNFUSED,), **summed.card(Problem, run),
)  # fmt: skip
