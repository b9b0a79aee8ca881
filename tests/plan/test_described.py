"""Kernels described without a device: what a launch compiles, for calls of all m."""

from __future__ import annotations

from dataclasses import replace

import pytest

import weft
from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.ops import cards
from weft.plan.described import common

SHAPES = {
    "ag_attention": {"m": 64, "q_heads": 2, "kv_heads": 1, "d": 16, "causal": 1, "sequences": 2},
    "flash_decode": {"m": 16, "n": 32, "k": 16, "heads": 4, "kv_heads": 2, "variable": 1},
}


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_what_a_call_launches_but_for_its_own_m(ranks, name):
    op, launched = cards()[name], []
    problem = op.make_problem(2, SHAPES[name], "float32")
    config = next(iter(op.candidates(problem, TARGETS["emu"])))

    def main():
        world = weft.init()
        op.run(world, problem, op.make_inputs(problem, world.rank), config)

    with triton_api.recorded_launches(lambda fn, make: launched.append((fn, make()))):
        ranks(main, 2)
    of_call = dict(launched)
    described = list(op.kernels(problem, config, TARGETS["emu"]))
    assert described
    for fn, record in described:
        exact = of_call[fn]
        assert record.name == exact.name and record.options == exact.options
        assert set(record.divisible_by_16) <= set(exact.divisible_by_16)
        assert record == common(exact, record)  # nothing is compiled in that the call lacks


def test_sizes_that_m_decides_are_open():
    op = cards()["ag_attention"]
    shape = {**SHAPES["ag_attention"], "m": 4096, "d": 128}
    problem = op.make_problem(4, shape, "bfloat16")
    (_, take), (_, attend) = op.kernels(problem, None, TARGETS["cuda:90"])
    assert "take" in take.name
    assert "shape.d" in attend.divisible_by_16 and "k_gathered" in attend.divisible_by_16
    assert not {"shape.tokens", "shards.m", "shards.rows"} & set(attend.divisible_by_16)


def test_what_is_one_in_one_call_alone_is_no_constant():
    one = KernelRecord("k", {"n": "constexpr", "x": ("constexpr", "i32")}, {"n": 1, "x": (1, None)})
    other = replace(one, signature={"n": "i32", "x": ("i32", "i32")}, constants={"x": (None, None)})
    found = common(one, other)
    assert found.signature == {"n": "i32", "x": ("i32", "i32")}
    assert found.constants == {"x": (None, None)}
