"""ag_rms_gemm, an operator that is a program: its signature, sizes, gradients; benchmarked too."""

from __future__ import annotations

import inspect

import pytest
import torch

import weft
from weft import ops
from weft.base.dtypes import tolerance
from weft.base.errors import ShapeError
from weft.base.target import TARGETS
from weft.ops.ag_rms_gemm import PROGRAM, op
from weft.plan.prepare import card_of
from weft.plan.program_cards import UNFUSED, Config

K, N, EPS = 24, 40, 0.5


def of_ranks(m, num_ranks):
    """x and its shards, gamma, and each rank's w."""
    torch.manual_seed(m)
    x, gamma = torch.randn(m, K), torch.randn(K)
    return x, gamma, [torch.randn(K, N) for _ in range(num_ranks)]


def normed(x, gamma, eps=EPS):
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * gamma


@pytest.mark.parametrize(("num_ranks", "shape"), op.awkward_shapes, ids=str)
@pytest.mark.parametrize("transport", ["overlapped", UNFUSED])
def test_awkward_shapes(ranks, num_ranks, shape, transport):
    problem = op.make_problem(num_ranks, shape, "float32")
    inputs = [op.make_inputs(problem, rank) for rank in range(num_ranks)]

    def main():
        world = weft.init()
        return op.run(world, problem, inputs[world.rank], Config(transport))

    wanted = op.reference(problem, inputs)
    for got, right in zip(ranks(main, num_ranks), wanted, strict=True):
        assert got.shape == right.shape == (shape["m"], shape["n"])
        error = (got - right).norm()
        assert error <= tolerance("float32", problem.k) * right.norm()


def test_eps_a_transposed_weight_and_shards_that_differ(ranks):
    m = 9
    x, gamma, weights = of_ranks(m, 2)

    def main():
        world = weft.init()
        own = x.chunk(2)[world.rank]
        w = weights[world.rank].t().contiguous().t()
        return ops.ag_rms_gemm(own, gamma, w, EPS, world=world, m=m)

    for got, w in zip(ranks(main, 2), weights, strict=True):
        torch.testing.assert_close(got, normed(x, gamma) @ w, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_formula(ranks):
    x, gamma, weights = of_ranks(8, 2)

    def main():
        world = weft.init()
        leaves = [x.chunk(2)[world.rank], gamma, weights[world.rank]]
        leaves = [one.clone().requires_grad_() for one in leaves]
        ops.ag_rms_gemm(*leaves, EPS, world=world).square().sum().backward()
        return [one.grad for one in leaves]

    found = ranks(main, 2)
    leaves = [one.clone().requires_grad_() for one in (x, gamma, *weights)]
    total = sum((normed(leaves[0], leaves[1]) @ w).square().sum() for w in leaves[2:])
    total.backward()
    assert torch.equal(found[0][1], found[1][1])  # what all ranks have alike
    got = [torch.cat([one[0] for one in found]), found[0][1]]
    for one, leaf in zip([*got, *(one[2] for one in found)], leaves, strict=True):
        torch.testing.assert_close(one, leaf.grad, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit(ranks):
    x, gamma, w = torch.ones(4, K), torch.ones(K), torch.ones(K, N)

    def main():
        world = weft.init()
        with pytest.raises(ShapeError, match=r"x has shape \(96,\); it must be \[m, k\]"):
            ops.ag_rms_gemm(x.flatten(), gamma, w, world=world)
        with pytest.raises(ShapeError, match="ag_rms_gemm.* w .*24"):
            ops.ag_rms_gemm(x, gamma, w[1:], world=world)

    ranks(main, 2)


def test_calls_with_one_set_of_sizes_are_one_program():
    sizes = (("k", K), ("n", N))
    first = PROGRAM.program_of("bfloat16", sizes, 4, ())
    assert first is PROGRAM.program_of("bfloat16", sizes, 4, ())
    assert first is not PROGRAM.program_of("bfloat16", sizes, 4, (("eps", EPS),))
    assert first.stages.program.name == "ag_rms_gemm"


def test_it_is_written_as_the_recipe_says():
    """The compiler, its card and the user need no more than this."""
    lines = inspect.getsource(inspect.getmodule(op.run)).splitlines()
    assert len(lines) <= 60


@pytest.mark.parametrize("target", ["cuda:90", "cuda:100", "hip:gfx942"])
def test_its_kernels_are_described_for_every_target(target):
    problem = op.make_problem(4, {"m": 4096, "k": 4096, "n": 7168}, "bfloat16")
    found = [record.name for _, record in op.kernels(problem, None, TARGETS[target])]
    assert sum("ag_rms_gemm_multiply" in name for name in found) == 1 and len(found) >= 2


def test_a_program_of_its_name_does_not_take_its_place():
    """One of its own programs is prepared, in another dtype."""
    sizes = (("k", 16), ("n", 8))
    made = [PROGRAM.program_of(dtype, sizes, 2, ()) for dtype in ("bfloat16", "float16")]
    cards = [card_of(one) for one in (*made, *made)]
    assert cards[:2] == cards[2:]
    shape = {"m": 4, "k": 16, "n": 8}
    found = [one.make_problem(2, shape, "float32").compiled for one in (op, *cards[:2])]
    assert found[1:] == made
    assert found[0] is PROGRAM.program_of("float32", sizes, 2, ())
