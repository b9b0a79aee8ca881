"""Symmetric inputs are read where they lie: they may change as soon as a call is over."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from calling import check_kernels

import weft
from weft.base.errors import CallOrderError
from weft.base.target import TARGETS

IN_PLACE = [
    ("all_gather", "sm_pull"), ("all_gather", "ce_pull"), ("reduce_scatter", "sm_pull"),
    ("all_reduce", "sm_pull"), ("all_to_all", "sm_pull"),
]  # fmt: skip
# Whole vectors in several tiles; nothing that divides; more ranks than tiles.
SHAPES = [(2, 16, 64), (3, 21, 35), (4, 4, 7)]


def loop_of_calls(name: str, transport: str, m: int, n: int, out_of: str) -> Any:
    """On one rank: calls whose input is overwritten right behind each; out is x, symmetric, or
    plain."""
    module = importlib.import_module(f"weft.ops.{name}")

    def main() -> None:
        world = weft.init()
        problem = module.op.make_problem(world.num_ranks, {"m": m, "n": n}, "float32")
        config = module.Config(transport, channels=2, block=32, num_warps=4)
        shape = module.op.make_inputs(problem, world.rank)["x"].shape
        x, there = (world.empty(tuple(shape), torch.float32) for _ in range(2))
        for seed in range(3):
            inputs = [module.op.make_inputs(problem, r, seed) for r in range(world.num_ranks)]
            x.copy_(inputs[world.rank]["x"])
            out = {"x": x, "symmetric": there, "plain": None}[out_of]
            got = getattr(module, name)(x, world=world, config=config, out=out).clone()
            x.fill_(-1.0)
            assert torch.equal(got, module.op.reference(problem, inputs)[world.rank])
        world.close()

    return main


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "transport"), IN_PLACE)
def test_inputs_that_change_right_behind_a_call(ranks, name, transport):
    for seed, (num_ranks, m, n) in enumerate(SHAPES):
        ranks(loop_of_calls(name, transport, m, n, "plain"), num_ranks, seed=seed)


@pytest.mark.few(1)
@pytest.mark.parametrize("out_of", ["x", "symmetric"])
def test_sums_go_straight_to_where_they_are_wanted(ranks, out_of):
    for seed, (num_ranks, m, n) in enumerate(SHAPES):
        ranks(loop_of_calls("all_reduce", "sm_pull", m, n, out_of), num_ranks, seed=seed)


def test_ranks_whose_inputs_lie_elsewhere(ranks):
    def main():
        world = weft.init()
        first, second = (world.zeros((4, 8), torch.float32) for _ in range(2))
        module = importlib.import_module("weft.ops.reduce_scatter")
        module.reduce_scatter(
            second if world.rank else first,
            world=world,
            config=module.Config("sm_pull", channels=1),
        )

    with pytest.raises(CallOrderError, match="reduce_scatter m=4,n=8 float32 at "):
        ranks(main, 2)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_compiles_and_keeps_its_waits(target):
    for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        op = importlib.import_module(f"weft.ops.{name}").op
        check_kernels(op, target, True, {"m": 64, "n": 64}, "bfloat16", in_place=True)


def test_what_is_chosen_in_place_fits():
    for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        op = importlib.import_module(f"weft.ops.{name}").op
        for target in TARGETS.values():
            for m in (4, 4096, 65536):
                problem = op.problem(m, 4096, 4, in_place=True)
                for config in op.candidates(problem, target):
                    config.check(problem, target)
