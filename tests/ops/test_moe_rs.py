"""moe_rs: right wherever tokens go, the same bits in every run, and the end of a whole layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from by_experts import call_in_turns, check_kernel, problem_for, small

import weft
from weft.base.errors import ShapeError
from weft.base.target import TARGETS
from weft.ops import card
from weft.ops.ag_moe import ag_moe
from weft.ops.moe_route import moe_route
from weft.ops.moe_rs import Config, Problem, moe_rs, op

EMU = TARGETS["emu"]
ELSEWHERE = ("cuda:80", "cuda:100", "hip:gfx942")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "m", "how"),
    [(1, 20, "anywhere"), (3, 41, "anywhere"), (4, 9, "all to one"), (4, 1, "anywhere")],
)
def test_a_whole_layer(ranks, num_ranks, m, how):
    """Routed, gathered and multiplied, silu, multiplied and scattered: nothing on the host."""
    hidden, inner, experts = 24, 16, 4
    torch.manual_seed(m)
    tokens, logits = torch.randn(m, hidden), torch.randn(m, experts)
    up = torch.randn(num_ranks, experts, hidden, inner) / hidden**0.5
    down = torch.randn(num_ranks, experts, inner, hidden) / inner**0.5
    if how == "all to one":
        logits[:, 3] = 9
    share, ids = logits.softmax(1).topk(2)
    share = share / share.sum(1, keepdim=True)
    expected = torch.zeros(m, hidden)
    for rank in range(num_ranks):
        for j in range(2):
            inside = torch.einsum("mk,mkn->mn", tokens, up[rank][ids[:, j]])
            made = torch.einsum(
                "mk,mkn->mn", torch.nn.functional.silu(inside), down[rank][ids[:, j]]
            )
            expected += share[:, j : j + 1] * made
    problem = problem_for(op, num_ranks, m)

    def main():
        world = weft.init()
        own = slice(*problem.shard(world.rank))
        routing = moe_route(logits[own], 2, world=world, m=m, tile_m=16)
        inside = ag_moe(tokens[own], up[world.rank], routing, world=world)
        inside = torch.nn.functional.silu(inside)
        return moe_rs(inside, down[world.rank], routing, world=world, config=Config(tile_n=16))

    got = torch.cat(ranks(main, num_ranks))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nodes", "transport"),
    [
        ("moe_rs", (3,), "sm_push"),
        pytest.param("moe_rs", (2, 1), "sm_push", marks=pytest.mark.slow),
        ("moe_rs", (2, 1), "relay"),
        pytest.param("moe_ar", (2, 1), "relay", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_called_in_turns_recorded_and_replayed_on_one_slot(
    ranks, name, nodes, transport, monkeypatch
):
    monkeypatch.setenv("WEFT_SLOTS", "1")
    summed = card(name)
    problem = problem_for(summed, 3, 20, nodes=nodes)
    main = call_in_turns(summed, problem, small(summed, problem, transport=transport))
    outs = [ranks(main, 3, nodes=nodes, seed=seed) for seed in range(2)]
    # The order of sums is fixed.
    assert all(map(torch.equal, *outs))


@pytest.mark.parametrize("sizes", [{"m": 0}, {"m": 8, "k": 0}], ids=str)
def test_nothing_to_do(ranks, sizes):
    problem = problem_for(op, 2, **sizes)

    def main():
        world = weft.init()
        return op.run(world, problem, op.make_inputs(problem, world.rank))

    for out in ranks(main, 2):
        assert out.shape == (problem.m // 2, 40) and not out.any()


def test_what_does_not_fit(ranks):
    def main():
        world = weft.init()
        x, b = torch.ones(16, 8), torch.ones(3, 8, 6)
        routing = moe_route(torch.randn(4, 3), 2, world=world, tile_m=16)
        with pytest.raises(ShapeError, match="x with 4 rows, but m=8 tokens .* takes 16 rows"):
            moe_rs(x[:4], b, routing, world=world)
        with pytest.raises(ShapeError, match="moe_rs: counts .* with experts=4 as in b"):
            moe_rs(x, torch.ones(4, 8, 6), routing, world=world)
        with pytest.raises(ShapeError, match=r"out has shape \(16, 6\); the result is \(4, 6\)"):
            moe_rs(x, b, routing, world=world, out=torch.ones(16, 6))

    ranks(main, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    ["cuda:90", *(pytest.param(one, marks=pytest.mark.slow) for one in ELSEWHERE)],
)
def test_compiles_and_keeps_its_waits(target):
    sizes = {"k": 384, "experts": 128, "top_k": 8, "b_is_nk": True}
    problem = Problem(4096, 2048, 4, **sizes)
    check_kernel(op, problem, target)
    check_kernel(op, replace(problem, nodes=(2, 2)), target, ("relay_tiles", "moe_rs_reduce"))
