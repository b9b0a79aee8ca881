"""all_to_all in programs: there and back, with gradients, where nothing divides, and attention."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.base.errors import PlacementError, UnsupportedError
from weft.compiler import Replicate, Shard, Tensor, all_to_all, attention
from weft.compiler.frontend import trace
from weft.compiler.passes.place import place
from weft.compiler.passes.tile import tile
from weft.megakernel import graph

K, HEAD = 8, 4


def part(whole: torch.Tensor, rank: int, ranks: int, dim: int) -> torch.Tensor:
    """A rank's, as torch.chunk splits it; empty beyond its last part."""
    found = whole.chunk(ranks, dim)
    return found[rank].clone() if rank < len(found) else whole.narrow(dim, 0, 0).clone()


def there(x, w):
    return all_to_all(x @ w, dim=1)


def back(x):
    return all_to_all(x, dim=0)


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "m", "n"), [(1, 7, 10), (2, 12, 24), (3, 7, 10), (4, 2, 5)])
def test_each_way_is_the_other_ones_gradient(ranks, m, n):
    to_heads = weft.program(mesh="tp", x=Tensor("float32", ("m", K), Shard(0)),
                            w=Tensor("float32", (K, n), Replicate()))(there)  # fmt: skip
    to_rows = weft.program(mesh="tp", x=Tensor("float32", ("m", n), Shard(1)))(back)
    x, w, gradient = torch.randn(m, K), torch.randn(K, n), torch.randn(m, n)
    y, dx, dw = x @ w, gradient @ w.t(), x.t() @ gradient

    def main():
        world = weft.init()
        own = [part(one, world.rank, ranks, dim).requires_grad_() for one, dim in ((x, 0), (y, 1))]
        weight = w.clone().requires_grad_()
        heads = to_heads(own[0], weight, world=world, m=m)
        rows = to_rows(own[1], world=world, m=m)
        torch.testing.assert_close(heads, part(y, world.rank, ranks, 1))
        torch.testing.assert_close(rows, part(y, world.rank, ranks, 0))
        heads.backward(part(gradient, world.rank, ranks, 1))
        rows.backward(part(gradient, world.rank, ranks, 0))
        torch.testing.assert_close(own[0].grad, part(dx, world.rank, ranks, 0))
        torch.testing.assert_close(weight.grad, dw)
        assert own[1].grad is not None
        torch.testing.assert_close(own[1].grad, part(gradient, world.rank, ranks, 1))
        with world.record() as recording, torch.no_grad():
            again = to_heads(own[0], weight, world=world, m=m)
        recording.replay()
        torch.testing.assert_close(again, heads)

    with weft.emulated(ranks) as session:
        session.run(main)


def ulysses(x, q, k, v, o):
    """Own tokens with all heads, all tokens with own heads, and back."""
    q, k, v = (all_to_all(x @ one) for one in (q, k, v))
    return all_to_all(attention(q, k, v, head=HEAD, causal=True), dim=0) @ o


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "m"), [(2, 9), (4, 16)])
def test_attention_of_tokens_that_are_split(ranks, m):
    """With fewer heads of keys than of queries."""
    heads, kv_heads = 2 * ranks, ranks
    sizes = [(m, K), (K, heads * HEAD), (K, kv_heads * HEAD), (K, kv_heads * HEAD),
             (heads * HEAD, K)]  # fmt: skip
    types = {name: Tensor("float32", size, Replicate())
             for name, size in zip("qkvo", sizes[1:])}  # fmt: skip
    layer = weft.program(mesh="tp", x=Tensor("float32", ("m", K), Shard(0)), **types)(ulysses)
    x, *weights = (torch.randn(*size) for size in sizes)
    q, k, v = ((x @ one).unflatten(1, (-1, HEAD)).transpose(0, 1) for one in weights[:3])
    attended = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=True
    )
    wanted = attended[0].transpose(0, 1).flatten(1) @ weights[3]

    def main():
        world = weft.init()
        got = layer(part(x, world.rank, ranks, 0), *weights, world=world, m=m)
        # Products of unscaled numbers: what is lost grows with the largest, not with each.
        part_wanted = part(wanted, world.rank, ranks, 0)
        torch.testing.assert_close(got, part_wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))

    with weft.emulated(ranks) as session:
        session.run(main)


def test_what_lies_otherwise_is_told_of_it():
    types = {name: Tensor("float32", ("m", 8), Shard(dim)) for dim, name in enumerate("xy")}
    with pytest.raises(PlacementError, match=r"all_to_all\(y, dim=0\)"):
        place(trace(lambda x, y: x + y, "tp", types))
    with pytest.raises(PlacementError, match=r"all_to_all cannot take x @ Shard\(0\)"):
        place(trace(lambda x, y: all_to_all(x, dim=0), "tp", types))


def test_the_persistent_kernel_refuses_it():
    program = tile(place(trace(back, "tp", {"x": Tensor("float32", (8, 8), Shard(1))})))
    with pytest.raises(UnsupportedError, match="all_to_all"):
        graph.build(program, {}, 2)
