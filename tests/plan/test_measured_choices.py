"""What was measured is found again by every operator's call, and taken where it fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from weft.base.target import TARGETS
from weft.compiler.buckets import key_of
from weft.ops import card, names
from weft.plan import choices
from weft.plan.choices import PROGRAMS
from weft.plan.described import DescribedWorld
from weft.tune.variants import worth_measuring

RANKS = 4


class Asked(dict):
    """A table without a choice, which notes what is asked for."""

    def __init__(self) -> None:
        super().__init__(none=None)
        self.keys_of: dict[str, list[str]] = {}

    def get(self, op: str, default: Any = None) -> Any:
        return Keys(self.keys_of.setdefault(op, []))


class Keys:
    def __init__(self, asked: list[str]) -> None:
        self.asked = asked

    def get(self, key: str) -> None:
        self.asked.append(key)


@pytest.mark.parametrize("name", names())
def test_a_call_asks_for_what_is_measured_at_its_sizes(name):
    """The problem that a call makes of its tensors has the key of that which is tuned."""
    op, asked = card(name), Asked()
    problem = op.make_problem(RANKS, op.default_shape, "bfloat16")
    described: Any = op.kernels
    world = DescribedWorld(RANKS, TARGETS["emu"], choices=asked)
    described.launches(problem, world, described.inputs(problem))
    assert set(asked.keys_of[problem.op]) == {key_of(problem)}
    own = {"ag_rms_gemm": PROGRAMS, "recv": "send"}.get(name, name)  # who receives sends before
    assert list(asked.keys_of)[0] == own, "and what it calls of others comes behind"


UNFUSED_BY = {"nccl", "unfused", "reduce_scatter", "all_reduce"}
WITH_TABLES = ("ag_moe", "moe_rs", "moe_ar", "moe_route", "ep_dispatch", "ep_combine",
               "ag_attention", "flash_decode")  # fmt: skip


# A library carries a message only where both its ranks let it, and each of them chooses by itself.
OF_TWO = {"send", "recv"}


@pytest.mark.parametrize("name", sorted({*names()} - OF_TWO))
def test_every_operator_has_an_unfused_way_that_is_measured(name):
    op, target = card(name), TARGETS["cuda:90"]
    problem = op.make_problem(RANKS, op.default_shape, "bfloat16")
    found = worth_measuring(op, problem, target)
    assert UNFUSED_BY & {one.transport for one in found}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WITH_TABLES)
def test_the_unfused_way_gives_the_operators_answer(ranks, name):
    op = card(name)
    (config,) = op.unfused
    shapes = [(2, op.default_shape), (2, {**op.default_shape, "m": 0}), op.awkward_shapes[0]]
    for num_ranks, shape in shapes:
        problem = op.make_problem(num_ranks, shape, "float32")
        everyone = [op.make_inputs(problem, rank) for rank in range(num_ranks)]
        right = op.reference(problem, everyone)

        def main(problem=problem, everyone=everyone) -> Any:
            world = weft.init()
            found = op.run(world, problem, everyone[world.rank], config)
            if name in (
                "ag_moe",
                "moe_rs",
                "moe_ar",
            ):  # of fp32 the host asks for rows of each expert
                return found
            with world.record() as recording:
                found = op.run(world, problem, everyone[world.rank], config)
            recording.replay()
            recording.replay()  # a slot that was not released hangs
            return found

        for found, expected in zip(ranks(main, num_ranks), right, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", WITH_TABLES)
def test_an_unfused_call_can_be_described_and_so_prepared(name):
    """Its tensors have no memory, so it may ask for no value."""
    op, target = card(name), TARGETS["cuda:90"]
    problem = op.make_problem(2, op.default_shape, "bfloat16")
    described: Any = op.kernels
    found = described.launches(
        problem, DescribedWorld(2, target), described.inputs(problem), op.unfused[0]
    )
    assert found, "kernels of the collectives that it calls"


def measured(m: int, **fields: Any) -> Any:
    """What a call of m rows takes, where a choice of these fields was measured for 1000."""
    op, target = card("gemm_rs"), TARGETS["cuda:90"]
    problem = op.make_problem(RANKS, {"m": 1000, "n": 4096, "k": 3584}, "bfloat16")
    config = replace(op.choose(problem, target), **fields)
    record = {"config": vars(config)}
    table = {"gemm_rs": {key_of(problem): {"eager": record, "recorded": record}}}
    world = DescribedWorld(RANKS, target, choices=table)
    return config, choices.config_of(world, replace(problem, m=m, b_is_nk=True))


def test_a_choice_is_that_of_the_whole_bucket_however_weights_lie():
    for m in (1000, 1004, 1020):
        config, found = measured(m, last=5)
        assert found == config
    config, found = measured(1024, last=5)
    assert found != config, "whole tiles are a bucket of their own"


def test_a_choice_that_does_not_fit_is_not_taken():
    config, found = measured(1000, transport="gone")
    assert found != config and found.transport != "gone"
