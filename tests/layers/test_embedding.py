"""Embeddings, logits and norms: as torch's, forward and backward, for any vocabulary."""

from __future__ import annotations

import copy

import pytest
import torch
from parallel import close, same_state, seeded, step
from torch import nn

import weft
from weft.layers import Activations, ParallelEmbedding, ParallelLMHead, ParallelNorm


class Model(nn.Module):
    def __init__(self, vocabulary: int, norm: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8, padding_idx=1)
        self.norm = getattr(nn, norm)(8)
        self.head = nn.Linear(8, vocabulary, bias=norm == "LayerNorm")

    def forward(self, ids):
        return self.head(torch.tanh(self.norm(self.embed(ids))))


@pytest.mark.few(2)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "vocabulary", "shape", "norm"),
    [(2, 10, (2, 3), "RMSNorm"), (3, 10, (5,), "LayerNorm"), (3, 4, (1, 1), "RMSNorm"),
     (3, 2, (4,), "RMSNorm"), (2, 6, (0,), "LayerNorm"), (1, 6, (3,), "RMSNorm")],
)  # fmt: skip
def test_as_torchs(ranks, num_ranks, vocabulary, shape, norm, split):
    ids = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(3))

    def main():
        with weft.init() as world:
            ordinary = seeded(lambda: Model(vocabulary, norm))
            model, lie = copy.deepcopy(ordinary), Activations(world, 0 if split else float("inf"))
            model.embed = ParallelEmbedding.from_module(model.embed, world, lie)
            model.norm = ParallelNorm.from_module(model.norm, world, lie)
            model.head = ParallelLMHead.from_module(model.head, world, lie)
            same_state(model, ordinary, world)
            got, want = model(ids), ordinary(ids)
            close(got, want)
            step(ordinary, want)
            step(model, got)
            same_state(model, ordinary, world)

    ranks(main, num_ranks)


def test_what_needs_all_rows_is_refused(ranks):
    def main():
        with weft.init() as world:
            with pytest.raises(weft.UnsupportedError, match=r"max_norm=1.0.*leave max_norm away"):
                ParallelEmbedding.from_module(nn.Embedding(4, 2, max_norm=1.0), world)

    ranks(main, 2)
