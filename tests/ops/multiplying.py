"""Every way of calling an operator that multiplies and sums over ranks, held to its reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiling import check_code

import weft
from weft.base.card import Op
from weft.base.dtypes import tolerance
from weft.base.target import TARGETS
from weft.compiler.schedules import SM_PUSH
from weft.language import triton_api
from weft.plan.problems import nodes_of

EMU = TARGETS["emu"]

AWKWARD = [
    pytest.param(4, 100, 32, 32, id="shards-of-25", marks=pytest.mark.slow),
    pytest.param(3, 91, 70, 50, id="nothing-divides"),
    pytest.param(2, 2, 64, 64, id="one-row-each"),
    pytest.param(1, 40, 48, 32, id="one-rank"),
    pytest.param(4, 1, 32, 32, id="empty-shards"),
    pytest.param(4, 9, 16, 16, id="last-shard-empty"),
    pytest.param(2, 64, 64, 64, id="tiles-divide", marks=pytest.mark.slow),
]


def scales_rows_on_a_cpu() -> bool:
    """torch 2.11 multiplies there by one scale for all."""
    a, ones = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(a, a.t(), ones, ones.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def problem_for(op: Op, num_ranks: int, m: int, n: int, k: int, dtype: str = "float32", **fields):
    return op.problem(m, n, num_ranks, dtype, k=k, **fields)


def config_for(op: Op, problem: Any, transport: str = SM_PUSH, **changes: Any) -> Any:
    """Small tiles, so that there are several to a part, the last of them ragged."""
    config = next(c for c in op.candidates(problem, EMU) if c.transport == transport)
    small = {"tile_m": 16, "tile_n": 32, "tile_k": 32}
    return replace(config, **{**small, **changes})


def check(op: Op, out: torch.Tensor, problem: Any, rank: int) -> None:
    inputs = [op.make_inputs(problem, other) for other in range(problem.num_ranks)]
    expected = op.reference(problem, inputs)[rank]
    assert out.shape == expected.shape and not out.isnan().any()
    if expected.numel():
        error = (out.float() - expected).norm() / expected.norm()
        rounded = getattr(problem, "out_dtype", problem.dtype)
        assert error <= tolerance(rounded, problem.k * problem.num_ranks)


def call_every_way(op: Op, problem: Any, config: Any) -> None:
    """Eager, recorded and replayed, another shape in between, eager again; on one rank."""
    world = weft.init()
    rank = world.rank
    mine = op.make_inputs(problem, rank)
    check(op, op.run(world, problem, mine, config), problem, rank)
    with world.record() as recording:
        out = op.run(world, problem, mine, config)
    for _ in range(3):
        out.fill_(float("nan"))
        recording.replay()
        check(op, out.clone(), problem, rank)
    other = replace(problem, m=problem.m + 37, n=problem.n // 2 + 1)
    check(op, op.run(world, other, op.make_inputs(other, rank), None), other, rank)
    recording.replay()
    check(op, out.clone(), problem, rank)
    for _ in range(3):
        check(op, op.run(world, problem, mine, config), problem, rank)
    world.close()


def any_schedule(
    op: Op, problem: Any, ranks: Any, transport: str = SM_PUSH
) -> list[list[torch.Tensor]]:
    """What the ranks get from three calls by each of three schedules; all right."""

    def main():
        world = weft.init()
        mine = op.make_inputs(problem, world.rank)
        config = config_for(op, problem, transport)
        outs = [op.run(world, problem, mine, config) for _ in range(3)]
        check(op, outs[0], problem, world.rank)
        return outs

    runs = [ranks(main, problem.num_ranks, seed=seed) for seed in range(3)]
    return [[out for run in runs for out in run[rank]] for rank in range(problem.num_ranks)]


def on_few_sms(op: Op, problem: Any) -> None:
    world = weft.init()
    mine = op.make_inputs(problem, world.rank)
    for _ in range(2):
        out = op.run(world, problem, mine, config_for(op, problem))
        check(op, out, problem, world.rank)


def by_every_candidate(op: Op, problem: Any) -> None:
    world = weft.init()
    mine = op.make_inputs(problem, world.rank)
    placed = replace(problem, nodes=nodes_of(world))
    for config in op.candidates(placed, world.target):
        for _ in range(2):
            check(op, op.run(world, problem, mine, config), problem, world.rank)


def unaligned_on_rank_0(op: Op, problem: Any) -> None:
    """There the plain template without descriptors takes part: tiles and signals are the same."""
    world = weft.init()
    mine = op.make_inputs(problem, world.rank)
    a = torch.empty(mine["a"].numel() + 1)[1:].view(mine["a"].shape).copy_(mine["a"])
    assert a.data_ptr() % 16 != 0 and a.is_contiguous()
    there = mine if world.rank else {**mine, "a": a}
    for inputs in (mine, there, mine, there):
        out = op.run(world, problem, inputs, config_for(op, problem))
        check(op, out, problem, world.rank)


# Sizes of a launch, which uniform registers do not hold: written once, read where a tile begins.
# Of Hopper's template; tiles of the plain one are not fitted to each target's registers.
MOST_STACK_BYTES = {"cuda:90": 40}
# Of its tiles of 320 columns, whose accumulator takes 160 registers, and of fp8, whose steps have
# accumulators of their own beside the tile's: sizes likewise, at most one read in a step of k.
WIDER_STACK_BYTES = 80


def check_products(
    kernels: Iterable[tuple[Any, Any]], target: Any, most_bytes: int | None = None
) -> None:
    """They compile and keep their waits; where sums fit in registers, that is where they are."""
    most_bytes = most_bytes or MOST_STACK_BYTES.get(target.name, 1 << 12)
    if target.backend == "emu":
        for fn, record in kernels:
            assert triton_api.compile_kernel(fn, record, target)
    else:
        check_code(kernels, target, most_bytes)
