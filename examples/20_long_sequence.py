"""20. A long sequence, split over the ranks: keys pass round a ring, zigzag shares out the work.

Tokens of two sequences, packed one behind the other, are split zigzag: of each sequence every rank
has a part in front and one behind, so causal attention is the same work on all. A layer's products
and norms treat tokens one by one; rotary angles go by tokens' places within their sequences; and
ring_attention sends keys and values from rank to rank while queries attend to those that have come.
A rank never holds more than two ranks' keys. Results and gradients are one process's.

    weft emulate examples/20_long_sequence.py --ranks 4
    torchrun --nproc-per-node 4 examples/20_long_sequence.py

`weft.ops.ag_attention(.., zigzag=True)` gathers the keys instead, and takes the same tensors.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import weft
from weft.layers import ring_attention, rotary, zigzag_join, zigzag_positions, zigzag_split
from weft.ops import all_reduce

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 8
STARTS = (0, 17, 41)


class Layer(nn.Module):
    """Attention, before it a norm; how tokens attend to each other is the caller's."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x, positions, attend):
        heads = self.qkv(self.norm(x)).unflatten(1, (-1, HEAD_DIM))
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
        q, k = (turned(one, positions) for one in (q, k))
        return x + self.out(attend(q, k, v).flatten(1))


def turned(x, positions):
    """Rotary embedding, as Llama has it."""
    cos, sin = (one[0, :, None] for one in rotary(positions[None], HEAD_DIM))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def in_one_process(q, k, v):
    """Each sequence by torch's attention."""
    made = []
    for first, end in zip(STARTS, STARTS[1:], strict=False):
        parts = (one[first:end].transpose(0, 1) for one in (q, k, v))
        made.append(scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True))
    return torch.cat(made, 1).transpose(0, 1)


def main():
    world = weft.init()
    torch.manual_seed(0)  # the same weights and tokens on all ranks
    layer, m = Layer().to(world.device), STARTS[-1]
    x, target = (torch.randn(m, HIDDEN).to(world.device) for _ in range(2))

    positions = torch.cat([torch.arange(b - a) for a, b in zip(STARTS, STARTS[1:], strict=False)])
    expected = layer(x, positions.to(world.device), in_one_process)
    (expected * target).sum().backward()
    wanted = [one.grad.clone() for one in layer.parameters()]
    layer.zero_grad()

    lengths = torch.tensor(STARTS, dtype=torch.int32, device=world.device)
    way = {"world": world, "cu_seqlens": lengths}

    def by_ring(q, k, v):
        return ring_attention(q, k, v, **way, zigzag=True, m=m)

    own = layer(zigzag_split(x, **way), zigzag_positions(m, **way), by_ring)
    (own * zigzag_split(target, **way)).sum().backward()

    torch.testing.assert_close(zigzag_join(own, **way, m=m), expected, rtol=1e-4, atol=1e-4)
    for one, whole in zip(layer.parameters(), wanted, strict=True):
        # Every rank has its tokens' share of a weight's gradient.
        total = all_reduce(one.grad.flatten(), world=world).view_as(whole)
        torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-4)
    assert len(own) in (m // world.num_ranks, m // world.num_ranks + 1)
    print(f"rank {world.rank}: {len(own)} of {m} tokens, {STARTS[1]} and {m - STARTS[1]} packed")
    world.close()


if __name__ == "__main__":
    main()
