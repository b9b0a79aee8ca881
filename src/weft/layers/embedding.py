"""An embedding whose rows, the vocabulary, are spread over the ranks as torch.chunk splits them.

y[i] = weight[ids[i]],  of the rank that has it; the others add zeros
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.base.errors import UnsupportedError
from weft.base.parts import part_of
from weft.layers.activations import Activations
from weft.layers.shards import like, shard_of
from weft.ops import all_reduce, reduce_scatter
from weft.runtime.world import World


class ParallelEmbedding(nn.Module):
    """Rows of all ranks' vocabulary. Collective.

    With `activations`, a forward pass begins here: own rows come out where they split them.

    Shapes  ids: any, alike on all ranks; the result: [*ids, dim], as activations lie. An id that no
            rank has gives zeros: nothing looks at ids on the host
    """

    def __init__(
        self, num: int, dim: int, world: World, *, padding: int | None = None,
        activations: Activations | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.world, self.activations = world, activations or Activations(world)
        self.first, end = part_of(num, world.rank, world.num_ranks)
        is_here = padding is not None and self.first <= padding < end
        self.padding = padding - self.first if padding is not None and is_here else None
        options = {"device": world.device, **options}
        self.weight = nn.Parameter(torch.randn(end - self.first, dim, **options))

    @classmethod
    def from_module(
        cls, module: nn.Embedding, world: World, activations: Activations | None = None
    ) -> ParallelEmbedding:
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, name, None):
                raise UnsupportedError(
                    f"{cls.__name__}: {name}={getattr(module, name)}, which would need all ranks' "
                    f"rows; leave {name} away, or this module out of the plan"
                )
        num, dim = module.weight.shape
        made = cls(
            num, dim, world, padding=module.padding_idx, activations=activations, device="meta"
        )
        made.weight = like(shard_of(module.weight, 0, world), module.weight)
        return made

    def extra_repr(self) -> str:
        rows, dim = self.weight.shape
        return f"own rows: {self.first} to {self.first + rows}, {dim}"

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.weight
        at = ids.reshape(-1) - self.first
        is_here = (at >= 0) & (at < weight.shape[0])
        # A rank without rows joins with a row of zeros.
        weight = weight if weight.shape[0] else functional.pad(weight, (0, 0, 0, 1))
        rows = functional.embedding(torch.where(is_here, at, 0), weight, self.padding)
        # Another rank's id stands at row 0 here, and gives it no gradient.
        rows = torch.where(is_here[:, None], rows, 0)
        lie = self.activations
        lie.begin(ids.shape)
        if lie.is_split:
            return lie.as_own(reduce_scatter(rows, world=self.world))
        return lie.as_all(all_reduce(rows, world=self.world))
