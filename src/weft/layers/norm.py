"""A norm, or another module that treats each row by itself, with weights that all ranks have."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from weft.layers.activations import Activations, shared
from weft.layers.shards import like, shard_of
from weft.runtime.world import World


class ParallelNorm(nn.Module):
    """What `module` does, whose gradients are summed over ranks where each has rows of its own.

    Without `activations` ranks always have rows of their own: their heads, as a norm of queries.
    """

    def __init__(
        self, module: nn.Module, world: World, activations: Activations | None = None
    ) -> None:
        super().__init__()
        self.world, self.activations = world, activations
        for name, one in module.named_parameters():
            self.register_parameter(name, like(shard_of(one, None, world), one))
        # No module of this one, but with the same parameters: they are here, under their names.
        module.__dict__["_parameters"] = self._parameters
        self._ordinary = (module,)

    @classmethod
    def from_module(
        cls, module: nn.Module, world: World, activations: Activations | None = None
    ) -> ParallelNorm:
        return cls(module, world, activations or Activations(world))

    def extra_repr(self) -> str:
        return repr(self._ordinary[0])

    def forward(self, x: Tensor) -> Tensor:
        module = self._ordinary[0]
        is_own = self.activations is None or self.activations.is_split
        if not is_own or not torch.is_grad_enabled():
            return module(x)
        named = {name: shared(one, self.world) for name, one in self.named_parameters()}
        return functional_call(module, named, (x,))
