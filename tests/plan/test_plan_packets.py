"""Sums of whole rows by packets, for small m: right at sizes that change, recorded and replayed."""

from __future__ import annotations

import pytest
import torch

import weft
import weft.ops
from weft.base.target import TARGETS
from weft.compiler import Partial, Replicate, Tensor, all_reduce, rms_norm, silu
from weft.compiler.facts import Facts, Settings
from weft.compiler.frontend import trace
from weft.compiler.passes.place import place
from weft.compiler.pipeline import overlap
from weft.ir.device import Launch
from weft.ops.all_reduce_rms_norm import op
from weft.plan import run_plan

EPS = 1e-6
LL = ("one_shot_ll", "two_shot_ll")


def total_and_norm(x, residual, weight):
    total = all_reduce(x) + residual
    return rms_norm(total, weight), total


def plan_of(
    function, num_ranks: int, n: int, engine: str = "one_shot_ll", dtype: str = "float32", height=1
):
    types = {
        "x": Tensor(dtype, ("m", n), Partial()),
        "residual": Tensor(dtype, ("m", n), Replicate()),
        "weight": Tensor(dtype, (1, n), Replicate()),
    }
    facts = Facts({"m": 16}, num_ranks, TARGETS["emu"])
    placed = place(trace(function, "tp", types))
    first = next(one.name for one in placed.tasks if one.kind == "all_reduce")
    tiles = {first: (height, n)} if height > 1 else {}
    return overlap(placed, facts, Settings(tiles, {first: engine}))


def given(problem, rank: int, seed: int) -> dict[str, torch.Tensor]:
    found = op.make_inputs(problem, rank, seed)
    return found | {"weight": found["weight"][None]}


def same(results, expected) -> bool:
    """Sums are in the order of ranks, as the reference's: the same bits."""
    (norm, total), (expected_norm, expected_total) = results, expected
    limits = {"rtol": 1e-2, "atol": 1e-2} if norm.dtype != torch.float32 else {}
    torch.testing.assert_close(norm, expected_norm, **limits)
    return torch.equal(total, expected_total)


@pytest.mark.parametrize(
    ("num_ranks", "n", "dtype", "engine"),
    [
        (2, 7, "bfloat16", "one_shot_ll"),
        (3, 12, "float32", "two_shot_ll"),
        pytest.param(4, 5, "float16", "one_shot_ll", marks=pytest.mark.slow),
        pytest.param(3, 24, "float32", "one_shot_ll", marks=pytest.mark.slow),
        pytest.param(4, 7, "bfloat16", "two_shot_ll", marks=pytest.mark.slow),
    ],
)
def test_totals_are_bitwise_those_of_the_reference(ranks, num_ranks, n, dtype, engine):
    """Eager, recorded, replayed; more rows and fewer in between, which lie in the same boxes."""
    stages = plan_of(total_and_norm, num_ranks, n, engine, dtype)

    def main():
        world = weft.init()

        def call(m: int, seed: int):
            problem = op.make_problem(num_ranks, {"m": m, "n": n}, dtype)
            mine = given(problem, world.rank, seed)
            inputs = [op.make_inputs(problem, rank, seed) for rank in range(num_ranks)]
            return mine, {"m": m}, op.reference(problem, inputs)[world.rank]

        for m, seed in ((9, 0), (1, 1), (4, 2), (9, 3)):
            mine, sizes, expected = call(m, seed)
            assert same(run_plan(stages, mine, sizes, world=world), expected)
        mine, sizes, expected = call(5, 4)
        run_plan(stages, mine, sizes, world=world)
        with world.record() as recording:
            results = run_plan(stages, mine, sizes, world=world)
        for _ in range(2):
            for one in results:
                one.fill_(float("nan"))
            recording.replay()
            assert same(results, expected)
        mine, sizes, expected = call(2, 5)
        assert same(run_plan(stages, mine, sizes, world=world), expected)
        world.close()

    ranks(main, num_ranks)


def layers(x, residual, weight):
    """Two sums of one call; what is between needs both norms."""
    first = silu(all_reduce(x)) * residual + residual
    again = rms_norm(first, weight, eps=1e-3)
    return rms_norm(again, weight), again


def test_other_work_on_the_sums(ranks):
    """By packets, two rows to a tile, and by pushes, in turns, of one program: those share neither
    slot nor epoch, these do. Without rows there is nothing to do."""
    plans = [plan_of(layers, 2, 12, one, height=2) for one in LL]
    assert [one.tile for plan in plans for one in plan.plan.of(Launch)] == [(2, 12)] * 2
    plans.append(plan_of(layers, 2, 12, "sm_push"))

    def main():
        world = weft.init()
        empty = given(op.make_problem(2, {"m": 0, "n": 12}, "float32"), world.rank, 0)
        results = run_plan(plans[0], empty, {"m": 0}, world=world)
        assert all(one.shape == (0, 12) for one in results)
        for seed in range(3):
            for stages in plans:
                problem = op.make_problem(2, {"m": 3 + seed, "n": 12}, "float32")
                everyones = [given(problem, rank, seed) for rank in range(2)]
                mine, sizes = everyones[world.rank], {"m": problem.m}
                results = run_plan(stages, mine, sizes, world=world)
                total = everyones[0]["x"] + everyones[1]["x"]
                first = torch.nn.functional.silu(total) * mine["residual"] + mine["residual"]
                again = normed(first, mine["weight"], 1e-3)
                for result, wanted in zip(results, (normed(again, mine["weight"], EPS), again)):
                    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
        world.close()

    ranks(main, 2)


def normed(value: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return value * torch.rsqrt(value.square().mean(1, keepdim=True) + eps) * weight
