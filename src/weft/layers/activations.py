"""How rows of activations lie between layers: spread over the ranks, or alike on all of them.

    split        each rank has its own rows, as torch.chunk splits them: products gather (ag_gemm)
                 and scatter (gemm_rs) what travels, norms and sums are done once
    replicated   every rank has all rows: products need none from elsewhere, and are summed on
                 every rank (gemm_ar)

Many rows travel beneath products, so they are split; few of them are bound by latency, and a layer
that is replicated has half as many collectives. All layers of a model share one `Activations`,
since a residual stream lies one way from its first layer to its last.

What is replicated has one gradient, alike on all ranks (docs/training.md). Four steps keep that so:
`shared`, `own_rows`, `all_rows`, and all_reduce with the gradient that operators give it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from weft.base.dtypes import DTYPES
from weft.base.errors import ShapeError, UsageError
from weft.base.hardware import Hardware, hardware_of
from weft.base.parts import part_of
from weft.compiler.cost import libraries, products
from weft.compiler.cost.products import Product
from weft.ops import all_gather, all_reduce
from weft.plan.problems import nodes_of
from weft.runtime.world import World

TILE = (128, 256, 64)
# Rows of a rank that fill tiles: those of a layer's products where no machine was measured.
UNMEASURED_ROWS = 128
MOST_ROWS = 1 << 16
FUSED = {
    "all_gather": partial(products.gathered_us, engine="ce_push"),
    "reduce_scatter": products.scattered_us,
    "all_reduce": products.reduced_us,
}


class Activations:
    """How the rows of a forward pass lie, for all layers that share this record.

    split_from: rows from which they are split; 0: always, inf, the default: never
    """

    def __init__(self, world: World, split_from: float = inf) -> None:
        self.world, self.split_from = world, split_from
        self.shape: tuple[int, ...] | None = None
        self.is_split = False

    @property
    def m(self) -> int:
        """Rows of all ranks."""
        if self.shape is None:
            raise UsageError(
                "activations: rows are to be split, but no pass has begun; call enter(x) with all "
                "rows, or begin(shape) where each rank has its own already"
            )
        return prod(self.shape)

    def begin(self, shape: Sequence[int]) -> None:
        """A forward pass begins whose activations have these sizes, on all ranks together, before
        their last dimension."""
        self.shape = tuple(shape)
        self.is_split = self.world.num_ranks > 1 and self.m >= self.split_from

    def enter(self, x: Tensor) -> Tensor:
        """Begin with what all ranks have alike: own rows of it where rows are split."""
        self.begin(x.shape[:-1])
        return self.as_own(own_rows(_flat(x), self.world)) if self.is_split else x

    def leave(self, x: Tensor) -> Tensor:
        """All rows, on every rank."""
        return self.as_all(all_rows(_flat(x), self.world, self.m)) if self.is_split else x

    def as_own(self, rows: Tensor) -> Tensor:
        """Own rows with as many dimensions as activations have."""
        assert self.shape is not None
        return rows.view(*[1] * (len(self.shape) - 1), -1, rows.shape[-1])

    def as_all(self, rows: Tensor) -> Tensor:
        """All rows with the sizes that the pass began with."""
        assert self.shape is not None
        return rows.view(*self.shape, rows.shape[-1])

    def own(self, x: Tensor, layer: str) -> Tensor:
        """[own rows, n] of what lies as activations do.

        Raises  ShapeError: these are not this rank's rows
        """
        rows = _flat(x)
        first, end = part_of(self.m, self.world.rank, self.world.num_ranks)
        if rows.shape[0] != end - first:
            raise ShapeError(
                f"{layer}: x has {rows.shape[0]} rows on rank {self.world.rank}, but of the "
                f"{self.m} rows that this pass began with it has {end - first}; call enter(x) once "
                "at the beginning of each pass, and leave(x) at its end"
            )
        return rows


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def split_from(world: World, hidden: int, inner: int, dtype: torch.dtype) -> int:
    """Rows from which a layer's two products are predicted to end earlier where rows are split.

        hidden -> inner -> hidden,  inner spread over the ranks

    Where no machine was measured, rows that fill tiles.
    """
    machine, n = hardware_of(world.target), world.num_ranks
    if machine is None:
        return UNMEASURED_ROWS * n

    def is_faster(m: int) -> bool:
        up = product_of(world, m, inner // n, hidden, dtype)
        down = product_of(world, m, hidden, inner // n, dtype)
        split = with_collective_us(up, machine, "all_gather")
        split += with_collective_us(down, machine, "reduce_scatter")
        alike = with_collective_us(down, machine, "all_reduce")
        return split < alike + libraries.product_us(up, machine)

    m = MOST_ROWS
    while m > 1 and is_faster(m // 2):
        m //= 2
    return m


def product_of(world: World, m: int, n: int, k: int, dtype: torch.dtype) -> Product:
    """[m, k] @ [k, n] on each rank, as the cost model takes it."""
    itemsize = DTYPES[str(dtype).removeprefix("torch.")].itemsize
    return Product(m, n, k, world.num_ranks, TILE, itemsize, num_nodes=len(nodes_of(world)))


def with_collective_us(product: Product, machine: Hardware, kind: str) -> float:
    """A product and the collective of its rows, by libraries or as one, whichever is faster."""
    return min(libraries.unfused_us(product, machine, kind), FUSED[kind](product, machine))


# ---------------------------------------------------------------------------------------------
# Steps between what is replicated and what is a rank's own


def shared(x: Tensor, world: World) -> Tensor:
    """x, alike on all ranks, each of which makes something else of it: back comes the sum."""
    return _Shared.apply(x, world) if _has_gradient(x, world) else x


def shared_rows(x: Tensor, first: int, seat: tuple[int, int], world: World) -> Tensor:
    """x, whose rows from `first` on are part `which` of `of`, `seat`, which other ranks have too:
    back comes their sum."""
    return _SharedRows.apply(x, first, seat, world) if _has_gradient(x, world) else x


def own_rows(x: Tensor, world: World) -> Tensor:
    """[own rows, n] of x, alike on all ranks; back come all ranks' rows."""
    if _has_gradient(x, world):
        return _OwnRows.apply(x, world)
    return _own(x, world)


def all_rows(x: Tensor, world: World, m: int) -> Tensor:
    """x of rank 0, of rank 1, ..., which all ranks use alike; back come own rows."""
    if _has_gradient(x, world):
        return _AllRows.apply(x, world, m)
    return all_gather(x.contiguous(), world=world, m=m)


def _has_gradient(x: Tensor, world: World) -> bool:
    return world.num_ranks > 1 and torch.is_grad_enabled() and x.requires_grad


def _own(x: Tensor, world: World) -> Tensor:
    return x[slice(*part_of(x.shape[0], world.rank, world.num_ranks))]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyright: ignore
        return all_reduce(gradient.contiguous(), world=ctx.world), None


class _SharedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: int, seat: tuple[int, int], world: World) -> Tensor:
        ctx.first, ctx.seat, ctx.world = first, seat, world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyright: ignore
        (which, of), own = ctx.seat, gradient[ctx.first :]
        # Of all parts, since a world sums over all of its ranks.
        parts = own.new_zeros(of * own.shape[0], *own.shape[1:])
        mine = slice(which * own.shape[0], (which + 1) * own.shape[0])
        parts[mine] = own
        summed = all_reduce(parts, world=ctx.world)[mine]
        return torch.cat((gradient[: ctx.first], summed)), None, None, None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world, ctx.m = world, x.shape[0]
        return _own(x, world)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyright: ignore
        return all_gather(gradient.contiguous(), world=ctx.world, m=ctx.m), None


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World, m: int) -> Tensor:
        ctx.world = world
        return all_gather(x.contiguous(), world=world, m=m)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyright: ignore
        return _own(gradient, ctx.world), None, None
