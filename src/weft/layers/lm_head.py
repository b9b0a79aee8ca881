"""Logits of a vocabulary that is spread over the ranks, as torch.chunk splits it.

logits = x @ weight^T + bias,  each rank's columns of it, gathered
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.base.parts import part_of
from weft.layers.activations import Activations, all_rows, shared
from weft.layers.linear import check_linear
from weft.layers.shards import like, shard_of
from weft.runtime.world import World


class ParallelLMHead(nn.Module):
    """All logits of all rows, alike on all ranks. Collective.

    A rank multiplies its rows of the weight by all rows of x; its product's rows are the
    vocabulary's, so gathering rows gathers logits: they come out as the transpose of [vocabulary,
    rows].

    Shapes  x: [.., hidden], as activations lie; the result: all rows, [.., vocabulary]
    """

    def __init__(
        self, hidden: int, num: int, world: World, *, bias: bool = False,
        activations: Activations | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.world, self.num = world, num
        self.activations = activations or Activations(world)
        first, end = part_of(num, world.rank, world.num_ranks)
        options = {"device": world.device, **options}
        self.weight = nn.Parameter(torch.randn(end - first, hidden, **options) * hidden**-0.5)
        self.bias = nn.Parameter(torch.zeros(end - first, **options)) if bias else None

    @classmethod
    def from_module(
        cls, module: nn.Linear, world: World, activations: Activations | None = None
    ) -> ParallelLMHead:
        check_linear(cls.__name__, module)
        num, hidden = module.weight.shape
        made = cls(hidden, num, world, activations=activations, device="meta")
        made.weight = like(shard_of(module.weight, 0, world), module.weight)
        if module.bias is not None:
            made.bias = like(shard_of(module.bias, 0, world), module.bias)
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = shared(self.activations.leave(x), self.world)
        part = self.weight @ x.reshape(-1, x.shape[-1]).t()
        part = part if self.bias is None else part + self.bias[:, None]
        return all_rows(part, self.world, self.num).t().unflatten(0, x.shape[:-1])
