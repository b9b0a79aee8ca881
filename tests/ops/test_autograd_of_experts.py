"""Gradients of a mixture of experts: those of torch on global tensors, for the tokens' choices."""

from __future__ import annotations

import pytest
import torch
from compiling import launched_by
from differentiating import leaf, shard, whole

import weft
from weft import ops
from weft.base.errors import UsageError
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.plan.experts_wgrad import experts_wgrad, start
from weft.verify import compiled

EXPERTS, TOP_K, K, N = 4, 2, 16, 24


def layer(x, logits, up, down, world, m, renormalise=True, down_to=ops.moe_rs):
    """Each rank has columns of `up` and rows of `down`; tokens are sharded."""
    routing = ops.moe_route(logits, TOP_K, world=world, m=m, renormalise=renormalise, tile_m=16)
    hidden = torch.relu(ops.ag_moe(x, up, routing, world=world))
    return down_to(hidden, down, routing, world=world)


def alone(x, logits, up, down, renormalise):
    """The same on all tokens, with every rank's part of the weights; ups and downs by rank."""
    share = logits.softmax(1)
    weights, ids = share.topk(TOP_K, 1)
    if renormalise:
        weights = weights / weights.sum(1, keepdim=True)
    out = 0
    for of_up, of_down in zip(up, down, strict=True):
        for j in range(TOP_K):
            hidden = torch.relu(torch.einsum("mk,mkn->mn", x, of_up[ids[:, j]]))
            made = torch.einsum("mn,mnk->mk", hidden, of_down[ids[:, j]])
            out = out + weights[:, j : j + 1] * made
    return out


@pytest.mark.slow
@pytest.mark.parametrize("down_to", [ops.moe_rs, ops.moe_ar], ids=["scattered", "everywhere"])
@pytest.mark.parametrize(
    ("num_ranks", "m", "is_nk", "renormalise"),
    [pytest.param(1, 9, False, False, marks=pytest.mark.slow), (3, 8, True, True)],
)
def test_a_layer_of_experts(ranks, num_ranks, m, is_nk, renormalise, down_to):
    generator = torch.Generator().manual_seed(1)
    x, given = whole(m, K, seed=1), whole(m, K, seed=2)
    # The last expert is nobody's choice.
    logits = torch.randn(m, EXPERTS, generator=generator) - torch.tensor([0, 0, 0, 99.0])
    ups = [whole(EXPERTS, K, N, seed=3 + rank) for rank in range(num_ranks)]
    downs = [whole(EXPERTS, N, K, seed=13 + rank) for rank in range(num_ranks)]
    leaves = [leaf(x), leaf(logits), [leaf(one) for one in ups], [leaf(one) for one in downs]]
    wanted = alone(*leaves, renormalise)
    (wanted * given).sum().backward()

    def laid(weight):
        return leaf(weight.transpose(1, 2).contiguous().transpose(1, 2) if is_nk else weight)

    def main():
        with weft.init() as world:
            rank = world.rank
            own = [leaf(shard(one, rank, num_ranks)) for one in (x, logits)]
            own += [laid(ups[rank]), laid(downs[rank])]
            out = layer(*own, world, m, renormalise, down_to)
            is_whole = down_to is ops.moe_ar
            mine = [one if is_whole else shard(one, rank, num_ranks) for one in (wanted, given)]
            (out * mine[1]).sum().backward()
            expected = [
                mine[0], shard(leaves[0].grad, rank, num_ranks),
                shard(leaves[1].grad, rank, num_ranks), leaves[2][rank].grad, leaves[3][rank].grad,
            ]  # fmt: skip
            found = [out, *(one.grad for one in own)]
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-3)
            assert not own[2].grad[-1].any()

    ranks(main, num_ranks)


@pytest.mark.few(1)
@pytest.mark.parametrize(("num_ranks", "by_choice"), [(2, False), (3, False), (3, True)])
def test_tokens_on_their_experts_ranks(ranks, num_ranks, by_choice):
    """Of rows, of choices' weights, and of what experts have; behind the last slot is nothing."""
    m, experts = 7, 5
    generator = torch.Generator().manual_seed(3)
    x, given = (torch.randn(m, K, generator=generator) for _ in range(2))
    scale = torch.randn(experts, K, generator=generator)
    weights, ids = torch.rand(m, experts, generator=generator).topk(TOP_K, 1)
    leaves = [leaf(x), leaf(weights), leaf(scale)]
    wanted = sum(
        leaves[1][:, j : j + 1] * torch.tanh(leaves[0] * leaves[2][ids[:, j]]) for j in range(TOP_K)
    )
    (wanted * given).sum().backward()

    def main():
        with weft.init() as world:

            def own(tensor):
                return shard(tensor, world.rank, num_ranks)

            rows, chosen, mine = leaf(own(x)), leaf(own(weights)), leaf(scale)
            sent, handle = ops.ep_dispatch(
                rows, own(ids).to(torch.int32), chosen, experts, world=world,
                max_tokens=-(-m // num_ranks), tile_m=16,
            )  # fmt: skip
            counts, first = handle.tables.counts.sum(0), -(-experts // num_ranks) * world.rank
            experts_of = torch.arange(len(counts)).repeat_interleave(counts) + first
            assert not sent[len(experts_of) :].any()
            factor = torch.zeros_like(sent)
            factor[: len(experts_of)] = mine[experts_of]
            made = torch.tanh(sent * factor)
            out = ops.ep_combine(made, handle, world=world, by_choice=by_choice)
            (out * own(given)).sum().backward()
            everyones = ops.all_reduce(mine.grad, world=world)
            for got, want in (
                (out, own(wanted)), (rows.grad, own(leaves[0].grad)),
                (chosen.grad, own(leaves[1].grad)), (everyones, leaves[2].grad),
            ):  # fmt: skip
                torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5)
            with pytest.raises(UsageError, match="ep_combine: out= has no gradient"):
                ops.ep_combine(sent, handle, world=world, out=torch.empty_like(rows))

    ranks(main, num_ranks)


@pytest.mark.slow
def test_a_compiled_layer(ranks):
    """One graph, forward and backward: the router's tables are values of it."""
    torch._dynamo.reset()
    given = [whole(6, K, seed=1), whole(6, EXPERTS, seed=2), whole(EXPERTS, K, N, seed=3)]
    given.append(whole(EXPERTS, N, K, seed=4))

    def main():
        with weft.init() as world:
            found = []
            for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
                leaves = [leaf(one) for one in given]
                out = call(*leaves, world, 6)
                out.sum().backward()
                found.append([out, *(one.grad for one in leaves)])
            assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    ranks(main, 1)


def test_weights_of_experts_alone(ranks):
    """Sums over each expert's slots; of one that has none zeros, and no slots at all."""
    counts = torch.tensor([[3, 0, 14], [2, 0, 1]], dtype=torch.int32)
    x, y = whole(20, 18, seed=1), whole(20, 35, seed=2)

    def main():
        with weft.init() as world:
            parts = zip(x.split([5, 0, 15]), y.split([5, 0, 15]), strict=True)
            wanted = torch.stack([a.t() @ b for a, b in parts])
            for is_nk in (False, True):
                found = experts_wgrad(x, y, counts, target=world.target, is_nk=is_nk)
                assert torch.equal(found, wanted)
                assert found.transpose(1, 2).is_contiguous() == is_nk
            none = experts_wgrad(x[:0], y[:0], counts * 0, target=world.target)
            assert none.shape == wanted.shape and not none.any()

    ranks(main, 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_its_kernel_compiles(target):
    target = TARGETS[target]
    for p, q, slots in ((2048, 768, 8192), (50, 70, 300)):
        shapes = ((slots, p), (slots, q), (128, p, q))
        x, y, out = (torch.empty(one, dtype=torch.bfloat16, device="meta") for one in shapes)
        first = torch.empty(129, dtype=torch.int32, device="meta")
        ((fn, record),) = launched_by(start(x, y, out, first, target).run)
        binary = triton_api.compile_kernel(fn, record, target)
        assert compiled(binary, target).ok
        if target.backend == "cuda":
            assert "st.local" not in binary.asm["ptx"]
