"""ag_moe, moe_rs and moe_ar where a rank has whole experts: expert parallelism by an all-gather."""

from __future__ import annotations

import pytest
import torch
from by_experts import call_in_turns, check_kernel, problem_for, small
from effort import slow_but

import weft
from weft.base.errors import ShapeError
from weft.ops.ag_moe import ag_moe
from weft.ops.ag_moe import op as gather
from weft.ops.moe_ar import moe_ar
from weft.ops.moe_ar import op as reduce
from weft.ops.moe_route import moe_route
from weft.ops.moe_rs import moe_rs
from weft.ops.moe_rs import op as scatter

HIDDEN, INNER = 24, 16


def layer(tokens, logits, up, down, top_k=2):
    """All experts of one rank: what each token's choices make of it, weighted, in their order."""
    share, ids = logits.softmax(1).topk(top_k)
    share = share / share.sum(1, keepdim=True)
    total = torch.zeros_like(tokens)
    for j in range(top_k):
        inside = torch.nn.functional.silu(torch.einsum("mk,mkn->mn", tokens, up[ids[:, j]]))
        total = total + share[:, j, None] * torch.einsum("mk,mkn->mn", inside, down[ids[:, j]])
    return total


def drawn(m, experts, how="anywhere", seed=0):
    made = torch.Generator().manual_seed(seed)
    tokens, logits = (torch.randn(m, one, generator=made) for one in (HIDDEN, experts))
    if how == "all to one":
        logits[:, experts - 1] = 9
    if how == "none to the last rank's":
        logits[:, experts // 2 :] -= 99
    up = torch.randn(experts, HIDDEN, INNER, generator=made) / HIDDEN**0.5
    down = torch.randn(experts, INNER, HIDDEN, generator=made) / INNER**0.5
    return tokens, logits, up, down


WHERE = ("anywhere", "all to one", "none to the last rank's")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "m", "how"),
    slow_but(
        [*((3, 41, how) for how in WHERE), (1, 20, WHERE[0]), (4, 1, WHERE[1]), (2, 0, WHERE[2])],
        [(*size, how) for size in ((1, 20), (2, 33), (4, 9), (4, 1), (2, 0)) for how in WHERE],
    ),
)
def test_a_whole_layer(ranks, num_ranks, m, how):
    experts = 2 * num_ranks
    tokens, logits, up, down = drawn(m, experts, how)
    problem = problem_for(gather, num_ranks, m, experts=experts, split_experts=True)

    def main():
        world = weft.init()
        own, mine = slice(*problem.shard(world.rank)), slice(2 * world.rank, 2 * world.rank + 2)
        routing = moe_route(
            logits[own], 2, world=world, m=m, tile_m=16, split_experts=True
        )  # fmt: skip
        inside = ag_moe(tokens[own], up[mine], routing, world=world)
        inside = torch.nn.functional.silu(inside)
        whole = moe_ar(inside, down[mine], routing, world=world)
        return moe_rs(inside, down[mine], routing, world=world), whole

    found = ranks(main, num_ranks)
    expected = layer(tokens, logits, up, down)
    torch.testing.assert_close(torch.cat([own for own, _ in found]), expected, rtol=1e-4, atol=1e-5)
    for _, whole in found:
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("op", [gather, scatter, reduce], ids=lambda op: op.name)
@pytest.mark.parametrize("transport", ["first", "unfused"])
def test_called_in_turns_recorded_and_replayed(ranks, op, transport):
    problem = problem_for(op, 3, 20, experts=6, split_experts=True)
    changes = {} if transport == "first" else {"transport": transport}
    ranks(call_in_turns(op, problem, small(op, problem, **changes)), 3)


@pytest.mark.few(1)
@pytest.mark.parametrize("op", [gather, scatter], ids=lambda op: op.name)
@pytest.mark.parametrize(
    "target",
    ["cuda:90", *(pytest.param(one, marks=pytest.mark.slow) for one in ("cuda:100", "hip:gfx942"))],
)
def test_it_compiles(op, target):
    fields = {"k": 64, "experts": 8, "tile_m": 128, "split_experts": True}
    check_kernel(op, problem_for(op, 2, 64, "bfloat16", **fields), target)


@pytest.mark.slow
def test_gradients_are_those_of_one_rank(ranks):
    """Of tokens, of logits and of each rank's own matrices."""
    m, experts, num_ranks = 13, 4, 2
    tokens, logits, up, down = (one.requires_grad_() for one in drawn(m, experts, seed=1))
    weights = torch.linspace(-1, 1, m)[:, None]
    (layer(tokens, logits, up, down) * weights).sum().backward()
    problem = problem_for(gather, num_ranks, m, experts=experts, split_experts=True)

    def main():
        world = weft.init()
        own, mine = slice(*problem.shard(world.rank)), slice(2 * world.rank, 2 * world.rank + 2)
        parts = ((tokens, own), (logits, own), (up, mine), (down, mine))
        given = [one.detach()[at].clone().requires_grad_() for one, at in parts]
        x, rated, first, second = given
        routing = moe_route(rated, 2, world=world, m=m, tile_m=16, split_experts=True)
        inside = torch.nn.functional.silu(ag_moe(x, first, routing, world=world))
        out = moe_rs(inside, second, routing, world=world)
        (out * weights[own]).sum().backward()
        return [one.grad for one in given]

    for i, whole in enumerate((tokens, logits, up, down)):
        got = torch.cat([one[i] for one in ranks(main, num_ranks)])
        torch.testing.assert_close(got, whole.grad, rtol=1e-4, atol=1e-5)


def test_experts_that_ranks_do_not_divide():
    with pytest.raises(ShapeError, match="5 experts on 2 ranks; each rank must have as many"):
        problem_for(gather, 2, 8, experts=5, split_experts=True)
