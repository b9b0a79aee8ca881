"""18. Training a model: an ordinary one, spread over the ranks by one line, learns a text.

`weft.parallelize` replaces attention, MLPs, embedding and logits of a small language model by
layers, each with its part of the weights on every rank. The loop is that of one process: all ranks
compute the same loss, AdamW steps on the parts that a rank has, and what all ranks have alike, the
norms, stays alike, since its gradients do. `split_from=0` splits rows too, between the layers.

    weft emulate examples/18_train_model.py --ranks 4
    torchrun --nproc-per-node 4 examples/18_train_model.py

The loop may call torch.compile(model) instead.
"""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import weft
from weft.layers import (
    ParallelAttention,
    ParallelEmbedding,
    ParallelLMHead,
    ParallelMLP,
    ParallelNorm,
)
from weft.layers.transformers_plans import alike, enters, leaves

HIDDEN, HEADS, STEPS = 32, 4, 5
TEXT = b"a tile that travels is multiplied on its way. "


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = HIDDEN // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)
        )

    def forward(self, x):
        parts = (one(x) for one in (self.q_proj, self.k_proj, self.v_proj))
        heads = [one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in parts]
        found = scaled_dot_product_attention(*heads, is_causal=True)
        return self.o_proj(found.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, 48, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(48, HIDDEN, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.attention = nn.RMSNorm(HIDDEN, eps=1e-6), Attention()
        self.norm_2, self.mlp = nn.RMSNorm(HIDDEN, eps=1e-6), MLP()

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


PLAN = {
    "embedding": alike(ParallelEmbedding), "logits": alike(ParallelLMHead),
    "*.attention": ParallelAttention, "*.mlp": ParallelMLP, "*.norm_?": ParallelNorm,
    "blocks": (enters, leaves),  # between these, each rank has its own rows
}  # fmt: skip


def language_model():
    parts = {"embedding": nn.Embedding(128, HIDDEN), "blocks": nn.Sequential(Block(), Block()),
             "logits": nn.Linear(HIDDEN, 128, bias=False)}  # fmt: skip
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def train(model, tokens):
    """The loss before each step."""
    losses, optimizer = [], torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main():
    world = weft.init()
    torch.manual_seed(0)  # the same weights on all ranks
    ordinary = language_model().to(world.device)
    tokens = torch.tensor([list(TEXT)], device=world.device)

    model = weft.parallelize(copy.deepcopy(ordinary), world, PLAN, split_from=0)
    losses, alone = train(model, tokens), train(ordinary, tokens)

    assert torch.allclose(losses, alone, rtol=1e-4), (losses, alone)
    assert losses[-1] < losses[0]
    first, last = losses[0].item(), losses[-1].item()
    own, whole = (sum(p.numel() for p in one.parameters()) for one in (model, ordinary))
    print(f"rank {world.rank}: {own} of {whole} weights; loss from {first:.2f} to {last:.2f}")
    world.close()


if __name__ == "__main__":
    main()
