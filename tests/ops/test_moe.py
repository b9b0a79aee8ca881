"""What ag_moe and moe_rs are asked alike: half precision, transposed weights, few SMs."""

from __future__ import annotations

import pytest
from by_experts import call_once, problem_for, small

from weft.ops import cards

pytestmark = pytest.mark.parametrize(
    "op", [cards()[name] for name in ("ag_moe", "moe_rs")], ids=lambda op: op.name
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_and_transposed_weights(ranks, op, dtype):
    problem = problem_for(op, 3, 30, dtype, b_is_nk=True, experts=4, top_k=4)
    ranks(call_once(op, problem), 3)


@pytest.mark.parametrize("num_sms", [3, 5])
def test_machines_with_few_sms(ranks, op, num_sms):
    problem = problem_for(op, 2, 40)
    fields = {"lanes": 3} if op.name == "ag_moe" else {}
    ranks(call_once(op, problem, small(op, problem, **fields)), 2, num_sms=num_sms)
