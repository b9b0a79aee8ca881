"""Linear layers of which each rank has columns of the result, or rows that are summed.

    column    y = x @ weight^T + bias,  out_features spread over the ranks; all rows of y
    row       y = sum over ranks of x @ weight^T, + bias,  in_features spread over the ranks

    activations   column                   row
    split         ag_gemm of own rows      gemm_rs, to own rows
    replicated    torch's product          gemm_ar

Source  Megatron-LM's tensor and sequence parallelism
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.base.errors import ShapeError, UsageError
from weft.layers.activations import Activations, shared, shared_rows
from weft.layers.shards import check_divides, like, shard_of
from weft.ops import ag_gemm, gemm_ar, gemm_rs
from weft.runtime.world import World


def check_linear(layer: str, module: Any) -> None:
    if not isinstance(module, nn.Linear):
        raise UsageError(
            f"{layer}: takes the shards of a torch.nn.Linear, not of {type(module).__name__}; put "
            "its weight, as [out_features, in_features], into one first"
        )


class _ParallelLinear(nn.Module):
    """A linear layer with [rows, columns] of its weight on this rank."""

    def __init__(
        self, rows: int, columns: int, world: World, bias: bool, activations: Activations | None,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        options = {"device": world.device, **options}
        self.world, self.activations = world, activations or Activations(world)
        self.weight = nn.Parameter(torch.empty(rows, columns, **options))
        self.bias = nn.Parameter(torch.zeros(rows, **options)) if bias else None
        nn.init.normal_(self.weight, std=columns**-0.5)

    def extra_repr(self) -> str:
        rows, columns = self.weight.shape
        return f"own part: {columns} -> {rows}, bias={self.bias is not None}"

    def _check(self, x: Tensor) -> None:
        k = self.weight.shape[1]
        if x.dim() < 1 or x.shape[-1] != k:
            raise ShapeError(
                f"{type(self).__name__}: x has shape {tuple(x.shape)}, but the weight of rank "
                f"{self.world.rank} takes [.., {k}]; pass activations as the layer before gave them"
            )


class ColumnParallelLinear(_ParallelLinear):
    """This rank's columns of x @ weight^T + bias, for all rows. Collective where rows are split.

    copies: (from which of its columns on, seat) other ranks have the same ones, or None

    Shapes  x: [.., in_features], as activations lie; the result: all rows, [.., out_features /
            num_ranks]
    Raises  ShapeError: ranks that do not divide out_features
    """

    copies: tuple[int, tuple[int, int]] | None = None

    def __init__(
        self, in_features: int, out_features: int, world: World, *, bias: bool = True,
        activations: Activations | None = None, **options: Any,
    ) -> None:  # fmt: skip
        own = check_divides(type(self).__name__, "out_features", out_features, world)
        super().__init__(own, in_features, world, bias, activations, options)

    @classmethod
    def from_module(
        cls, module: nn.Linear, world: World, activations: Activations | None = None
    ) -> ColumnParallelLinear:
        return cls.from_modules([module], world, activations)

    @classmethod
    def from_modules(
        cls, modules: Sequence[nn.Linear], world: World, activations: Activations | None = None,
        seats: Sequence[tuple[int, int]] = (),
    ) -> ColumnParallelLinear:  # fmt: skip
        """One layer of several that have the same input: its columns are theirs, one after the
        other, so rows are gathered once.

        seats: of each module the part that this rank has, by default as its number is
        """
        seats = seats or [(world.rank, world.num_ranks)] * len(modules)
        for one, (_, of) in zip(modules, seats, strict=True):
            check_linear(cls.__name__, one)
            if of == world.num_ranks:
                check_divides(cls.__name__, "out_features", one.weight.shape[0], world)

        def own(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat([shard_of(one, 0, world, at) for one, at in zip(parts, seats)])

        weights = [one.weight for one in modules]
        weight = own(weights)
        made = cls(
            weight.shape[1], len(weight) * world.num_ranks, world, bias=False,
            activations=activations, device="meta",
        )  # fmt: skip
        made.weight = like(weight, *weights)
        biases = [one.bias for one in modules if one.bias is not None]
        if len(biases) not in (0, len(modules)):
            raise ShapeError(
                f"{cls.__name__}: {len(biases)} of {len(modules)} modules have a bias; all or none "
                "must, as they become one product: give the others a bias of zeros"
            )
        if biases:
            made.bias = like(own(biases), *biases)
        return made

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        lie, weight, bias = self.activations, self.weight, self.bias
        if self.copies is not None:
            weight = shared_rows(weight, *self.copies, self.world)
            bias = None if bias is None else shared_rows(bias, *self.copies, self.world)
        if not lie.is_split:
            return functional.linear(shared(x, self.world), weight, bias)
        rows = lie.own(x, type(self).__name__).contiguous()
        y = lie.as_all(ag_gemm(rows, weight.t(), world=self.world, m=lie.m))
        return y if bias is None else y + bias


class RowParallelLinear(_ParallelLinear):
    """The sum over ranks of x @ weight^T, + bias, lying as activations do. Collective.

    Shapes  x: all rows, [.., in_features / num_ranks], this rank's columns; the result: [..,
            out_features]
    Raises  ShapeError: ranks that do not divide in_features
    """

    def __init__(
        self, in_features: int, out_features: int, world: World, *, bias: bool = True,
        activations: Activations | None = None, **options: Any,
    ) -> None:  # fmt: skip
        own = check_divides(type(self).__name__, "in_features", in_features, world)
        super().__init__(out_features, own, world, bias, activations, options)

    @classmethod
    def from_module(
        cls, module: nn.Linear, world: World, activations: Activations | None = None
    ) -> RowParallelLinear:
        check_linear(cls.__name__, module)
        rows, columns = module.weight.shape
        made = cls(columns, rows, world, bias=False, activations=activations, device="meta")
        made.weight = like(shard_of(module.weight, 1, world), module.weight)
        if module.bias is not None:
            made.bias = like(shard_of(module.bias, None, world), module.bias)
        return made

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        lie, bias = self.activations, self.bias
        rows = x.reshape(-1, x.shape[-1])
        if lie.is_split:
            y = lie.as_own(gemm_rs(rows, self.weight.t(), world=self.world))
            # Each rank has a share of the bias's gradient: that of its own rows.
            bias = None if bias is None else shared(bias, self.world)
        else:
            y = gemm_ar(rows, self.weight.t(), world=self.world)
            y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias
