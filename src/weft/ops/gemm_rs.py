"""GEMM, then reduce-scatter, as one operator: out = own rows of sum over ranks (A[m, k] @ B[k, n]).

Every rank has all m rows of A and a part of k, and gets the sums of its shard of the rows, which
are split as torch.chunk splits them: shards may be ragged, or empty. Sums are in fp32; other ranks'
shares travel in the result's dtype, and are added in the order rank + 1, + 2, ...

Plan    the compiler's, of `gemm_rs` below (`weft explain gemm_rs`): tiles of the other ranks' rows
        come first and travel beneath the products behind them; own ones last, which add the others'
        shares. sm_push: SMs store tiles to their owner; ce_push: copy engines carry chunks of
        columns; reduce_scatter and nccl: cuBLAS, then weft's own or the library's
Signals the plan's: a word for each own tile and source, or for each chunk that engines carry
Limits  A is row-major and has the same m and k's dtype on all ranks; B is [k, n] or a transposed
        [n, k]; the template for Hopper needs all ranks on one node
Source  the design's section 4; FLUX for the order
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from weft.base.card import Op, Trial, calling, trials
from weft.base.target import Target
from weft.compiler import frontend
from weft.compiler.schedules import CE_PUSH, LIBRARY, SM_PUSH, Config, fused
from weft.ops import _baselines
from weft.ops.reduce_scatter import reduce_scatter
from weft.plan import nccl, operations, summed
from weft.plan.call_cache import find_call
from weft.runtime.world import World

# Rows of a rank that fill tiles (2 x H200, 256 rows, n 8192, k 2048: 52 us, unfused 54).
FUSED_ROWS = 128
UNFUSED = "reduce_scatter"
CHUNKS = {0: {"chunks": 2}, 2: {"chunks": 1}}  # of a trial's calls by size


def program(a: Any, b: Any) -> Any:
    return frontend.reduce_scatter(a @ b)


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32."""
    total = summed.total(inputs)
    return [total[slice(*problem.shard(rank))] for rank in range(problem.num_ranks)]


def sum_unfused(world: World, transport: str, product: Any, a: Any, b: Any, out: Any) -> None:
    if transport == LIBRARY:
        nccl.reduce_scatter(world, torch.mm(a, b), out)
    else:
        reduce_scatter(product(a, b), world=world, out=out)


class Problem(summed.Problem):
    """m rows over all ranks, n columns and k of each rank; a rank's result is its shard."""

    op = "gemm_rs"
    transports = (SM_PUSH, CE_PUSH, UNFUSED)
    program, sum_unfused = staticmethod(program), staticmethod(sum_unfused)

    def result_rows(self, rank: int) -> tuple[int, int]:
        return self.shard(rank)


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    is_small = problem.rows < FUSED_ROWS and target.backend != "emu"
    unfused, found = [Config(transport=UNFUSED)], fused(problem, target)
    is_behind = is_small or len(problem.nodes) > 1
    for kind in (unfused, found) if is_behind else (found, unfused):
        yield from kind
    if target.backend == "cuda" and problem.is_even:
        yield Config(transport=LIBRARY)


def choose(problem: Problem, target: Target, is_recorded: bool = False) -> Config:
    """The configuration to take when nothing was measured: a pure function of these."""
    found = candidates(problem, target)
    return next(one for one in found if not (is_recorded and one.transport == CE_PUSH))


def gemm_rs(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    world: World,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' products. Collective.

        out = (a of rank 0 @ b of rank 0 + a of rank 1 @ b of rank 1 + ...)[rows of this rank]

    Shapes  a: [m, k], contiguous; b: [k, n], contiguous or a transposed [n, k]; out: [rows of this
            rank, n], rows split as torch.chunk splits m
    Dtypes  all alike, float16, bfloat16 or float32; sums in fp32, other ranks' shares rounded once
    Sync    stream-ordered on the current stream; can be recorded, but not where the configuration
            says transport="ce_push": a recorded call that names none takes another, and so do all
            where torch.use_deterministic_algorithms says so
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
            UsageError: a configuration that cannot be recorded
    """
    if operations.is_asked(a, b):
        return operations.as_operation("gemm_rs", world, (a, b), config=config, out=out)
    rest = (torch.are_deterministic_algorithms_enabled(), config)
    return find_call(world, "gemm_rs", (a, b, out), rest, _make_call)(out, a=a, b=b)


def _make_call(
    world: World, a: Any, b: Any, out: Any, is_deterministic: bool, config: Any
) -> summed.Call:
    problem = problem_of(world, a, b, out)
    chosen = config or choose(problem, world.target, is_recorded=is_deterministic)
    recorded = None
    if config is None and chosen.transport == CE_PUSH:
        recorded = choose(problem, world.target, is_recorded=True)
    return summed.Call(world, problem, chosen, {"a": a, "b": b}, recorded)


problem_of = partial(summed.problem_of, Problem)
run = calling(gemm_rs)

op = Op(
    name="gemm_rs",
    summary="out = rows of this rank of sum(A[m, k] @ B[k, n] over ranks)",
    problem=Problem,
    reference=reference,
    candidates=candidates,
    choose=choose,
    trials=(
        *trials({"m": 56, "n": 24, "k": 16}),
        # More tiles than one to a rank, of which the last has no rows.
        Trial((2,), {"m": 70, "n": 40, "k": 16}, SM_PUSH),
        # Words may be those of another chunk where the next call has more.
        Trial((3,), {"m": 56, "n": 32, "k": 16}, CE_PUSH, calls=(2, 0) * 3, configs=CHUNKS),
    ),
    awkward_shapes=(
        (4, {"m": 388, "n": 96, "k": 64}),
        (3, {"m": 291, "n": 70, "k": 50}),
        *summed.AWKWARD_SHAPES,
    ),
    baselines=_baselines.GEMM_RS,
    backward=("ag_gemm", "ag_wgrad"),
    composed=(UNFUSED,),
    **summed.card(Problem, run),
)
