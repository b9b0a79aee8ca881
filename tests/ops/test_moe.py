"""What ag_moe and moe_rs are asked alike: half precision, transposed weights, few SMs."""

from __future__ import annotations

import time

import pytest
import torch
from by_experts import call_once, check, problem_for, small

import weft
from weft.base.errors import DtypeError, ShapeError
from weft.ops import cards

pytestmark = pytest.mark.parametrize(
    "op", [cards()[name] for name in ("ag_moe", "moe_rs", "moe_ar")], ids=lambda op: op.name
)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_half_precision_and_transposed_weights(ranks, op, dtype):
    problem = problem_for(op, 3, 30, dtype, b_is_nk=True, experts=4, top_k=4)
    ranks(call_once(op, problem), 3)


@pytest.mark.few(1)
@pytest.mark.parametrize("num_sms", [3, 5])
def test_machines_with_few_sms(ranks, op, num_sms):
    problem = problem_for(op, 2, 40)
    fields = {"pushers": 3} if op.name == "ag_moe" else {}
    ranks(call_once(op, problem, small(op, problem, **fields)), 2, num_sms=num_sms)


@pytest.mark.few(1)
def test_tables_that_say_more_than_they_hold_are_read_as_far_as_they_go(ranks, op):
    """A number of tiles that is wrong costs no time, and no tile: those behind the last hold
    nothing. Of ranks that have tokens of a tile there are no more than ranks."""
    problem = problem_for(op, 2, 20)

    def main():
        world = weft.init()
        mine = op.make_inputs(problem, world.rank)
        for name, row in (("num_tiles", slice(None)), ("tiles", 4)):
            wrong = dict(mine)
            wrong[name] = mine[name].clone()
            used = int(mine["num_tiles"])
            if name == "tiles":  # the last rank that has tokens of each
                wrong[name][row, :used] = torch.where(
                    wrong[name][row, :used] == 1, 2**30, wrong[name][row, :used]
                )
            else:
                wrong[name].fill_(2**30)
            check(op, op.run(world, problem, wrong), problem, world.rank)

    start = time.monotonic()
    ranks(main, 2)
    assert time.monotonic() - start < 60


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("name", "wrong", "error", "told"),
    [
        ("tiles", lambda one: one[:, :-1].contiguous(), ShapeError, "turns has shape"),
        ("turns", lambda one: one.repeat(2), ShapeError, "turns has shape"),
        (
            "num_tiles",
            lambda one: one.repeat(2),
            ShapeError,
            r"num_tiles has shape \(2,\); of m=20",
        ),
        ("token_of", lambda one: one[1:].clone(), ShapeError, "weight_of has shape"),
        ("weight_of", lambda one: one.double(), DtypeError, "weight_of torch.float64"),
        (
            "counts",
            lambda one: one.long(),
            DtypeError,
            "counts torch.int64; pass",
        ),
        ("slot_of", lambda one: one.flatten(), ShapeError, "slot_of has shape"),
    ],
)
def test_tables_that_no_router_made_are_refused(ranks, op, name, wrong, error, told):
    problem = problem_for(op, 2, 20)

    def main():
        world = weft.init()
        mine = op.make_inputs(problem, world.rank)
        op.run(world, problem, mine)
        mine[name] = wrong(mine[name])
        with pytest.raises(error, match=told):
            op.run(world, problem, mine)

    ranks(main, 2)
