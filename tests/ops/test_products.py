"""What gemm_rs and gemm_ar are asked alike: few SMs, other nodes, unaligned rows, nothing to do."""

from __future__ import annotations

import pytest
from multiplying import by_every_candidate, on_few_sms, problem_for, unaligned_on_rank_0

import weft
from weft.ops import cards

pytestmark = pytest.mark.parametrize(
    "op", [cards()[name] for name in ("gemm_ar", "gemm_rs")], ids=lambda op: op.name
)


@pytest.mark.parametrize("num_sms", [1, 5])
def test_machines_with_few_sms(ranks, op, num_sms):
    problem = problem_for(op, 2, 100, 64, 32)
    ranks(lambda: on_few_sms(op, problem), 2, num_sms=num_sms)


@pytest.mark.few(1)
@pytest.mark.parametrize("nodes", [2, 3])
def test_ranks_out_of_direct_reach(ranks, op, nodes):
    problem = problem_for(op, 3, 70, 32, 32)
    ranks(lambda: by_every_candidate(op, problem), 3, nodes=nodes)


@pytest.mark.few(1)
def test_addresses_that_tma_cannot_take_on_one_rank_only(ranks, op):
    problem = problem_for(op, 2, 96, 32, 32)
    ranks(lambda: unaligned_on_rank_0(op, problem), 2)


@pytest.mark.parametrize("shape", [(0, 16, 16), (8, 0, 16), (8, 16, 0)], ids=str)
def test_nothing_to_do(ranks, op, shape):
    m, n, k = shape
    problem = problem_for(op, 2, m, n, k)

    def main():
        world = weft.init()
        out = op.run(world, problem, op.make_inputs(problem, world.rank))
        assert out.shape == ((m if op.name == "gemm_ar" else m // 2), n) and not out.any()

    ranks(main, 2)
