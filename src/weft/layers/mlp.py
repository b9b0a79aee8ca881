"""The feed-forward part of a layer: one product up, gate and up together, and one down.

    gated    y = (act(x @ gate^T) * (x @ up^T)) @ down^T
    plain    y = act(x @ up^T) @ down^T

The inner columns are spread over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from weft.layers.activations import Activations
from weft.layers.gating import Gating
from weft.layers.linear import ColumnParallelLinear, RowParallelLinear
from weft.layers.shards import check_divides, name_parts, one_of
from weft.runtime.world import World

# What ordinary modules call their parts, in order: (gate, up, down), or (up, down).
NAMES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("linear1", "linear2"),
    ("0", "2"),
)
ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation", "1")


class ParallelMLP(nn.Module):
    """An MLP whose inner columns are spread over the ranks. Collective.

    names: what an ordinary module calls the parts, in order gate, up, down, as state dicts have
    them; of a plain one up, down.

    Shapes  x, the result: [.., hidden], as activations lie
    Raises  ShapeError: ranks that do not divide `inner`
    """

    def __init__(
        self, hidden: int, inner: int, world: World, *, gated: bool = True, bias: bool = False,
        act: Callable[[Tensor], Tensor] = functional.silu, names: tuple[str, ...] = (),
        activations: Activations | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        own = check_divides(type(self).__name__, "inner", inner, world)
        *ups, down = names or (NAMES[0] if gated else NAMES[2])
        gated = len(ups) == 2
        activations, options = activations or Activations(world), {**options, "bias": bias}
        self.up = ColumnParallelLinear(
            hidden, inner * len(ups), world, activations=activations, **options
        )
        self.down = RowParallelLinear(inner, hidden, world, activations=activations, **options)
        self.hidden, self.inner, self.gated, self.act = hidden, inner, gated, act
        self._gate = Gating(act, own, self.up.weight.dtype, world) if gated else None
        name_parts(self, "up", dict.fromkeys(ups, own))
        name_parts(self, "down", {down: hidden})

    @classmethod
    def from_module(
        cls, module: nn.Module, world: World, activations: Activations | None = None
    ) -> ParallelMLP:
        """Of a module with linear layers of one of the sets of names in NAMES, or nn.Sequential of
        a linear layer, a function and a linear layer."""
        found = [names for names in NAMES if all(hasattr(module, name) for name in names)]
        if not found:
            expected = sorted({name for names in NAMES for name in names})
            one_of(cls.__name__, module, *expected)
        *ups, down = (getattr(module, name) for name in found[0])
        activations = activations or Activations(world)
        inner, hidden = ups[0].weight.shape
        made = cls(
            hidden, inner, world, names=found[0], activations=activations,
            act=one_of(cls.__name__, module, *ACTIVATIONS), device="meta", dtype=down.weight.dtype,
        )  # fmt: skip
        made.up = ColumnParallelLinear.from_modules(ups, world, activations)
        made.down = RowParallelLinear.from_module(down, world, activations)
        return made

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(self.act(h) if self._gate is None else self._gate(h))
