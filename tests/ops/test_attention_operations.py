"""ag_attention under torch's autograd and torch.compile: gradients of its backward, one graph."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

import weft
from weft import ops
from weft.base.errors import UsageError
from weft.plan.operator_gradients import ag_attention_backward

M, HEADS, KV_HEADS, D = 9, 4, 2, 16
LENGTHS = torch.tensor([0, 4, 9], dtype=torch.int32)


@pytest.fixture(autouse=True)
def compile_anew():
    """What other tests have had compiled is none of this one's."""
    torch._dynamo.reset()


def shards(rank):
    """q, k, v, and a gradient of out: this rank's tokens."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(M, n, D, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [one[5 * rank : 5 * rank + 5] for one in whole]


def test_backward_is_its_own(ranks):
    """Bit by bit; with a gradient of lse; and without any where none is asked for."""

    def main():
        world = weft.init()
        *tensors, d_out = shards(world.rank)
        way = {"world": world, "m": M, "cu_seqlens": LENGTHS}
        out, lse = ops.ag_attention(*tensors, **way, with_lse=True)
        wanted = ag_attention_backward(*tensors, out, lse, d_out, 2 * lse, **way)
        leaves = [one.clone().requires_grad_() for one in tensors]
        got, log = ops.ag_attention(*leaves, **way, with_lse=True)
        assert torch.equal(got, out) and torch.equal(log, lse)
        ((got * d_out).sum() + (log * log).sum()).backward()
        for leaf, grad in zip(leaves, wanted, strict=True):
            assert torch.equal(leaf.grad, grad)
        with torch.no_grad():
            assert not ops.ag_attention(*leaves, **way).requires_grad
        # Queries alone learn: all ranks still take part in what travels.
        alone = ops.ag_attention(leaves[0], *tensors[1:], **way)
        (grad,) = torch.autograd.grad((alone * d_out).sum(), leaves[0])
        zeros = torch.zeros_like(lse)
        assert torch.equal(grad, ag_attention_backward(*tensors, out, lse, d_out, zeros, **way)[0])

    ranks(main, 2)


def test_gradients_have_no_gradients(ranks):
    def main():
        world = weft.init()
        leaves = [one.clone().requires_grad_() for one in shards(0)[:3]]
        out = ops.ag_attention(*leaves, world=world)
        grads = torch.autograd.grad(out.sum(), leaves, create_graph=True)
        with pytest.raises(UsageError, match="its gradients have none"):
            grads[0].sum().backward()
        with pytest.raises(UsageError, match="out= has no gradient"):
            ops.ag_attention(*leaves, world=world, out=torch.empty(5, HEADS, D))

    ranks(main, 1)


@pytest.mark.slow
def test_compiled_it_is_one_operation(ranks):
    """In one graph, forward and back, and the same bits."""

    def main():
        world = weft.init()
        *tensors, d_out = shards(world.rank)
        rank, found, kept = world.rank, [], EagerAndRecordGraphs()

        def call(q, k, v):
            # A function of each rank's own: emulated ranks share what torch has compiled of one.
            return ops.ag_attention(q, k, v, world=world, m=M) * 2 if rank + 1 else None

        for backend in (None, kept, "aot_eager"):
            leaves = [one.clone().requires_grad_() for one in tensors]
            compiled = torch.compile(call, backend=backend, fullgraph=True) if backend else call
            out = compiled(*leaves)
            (out * d_out).sum().backward()
            found.append([out.detach(), *(leaf.grad for leaf in leaves)])
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other))
        (graph,) = kept.graphs
        targets = [str(node.target) for node in graph.graph.nodes]
        assert targets.count("weft.ag_attention.default") == 1

    ranks(main, 2)
