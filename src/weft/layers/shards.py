"""This rank's parts of an ordinary module's parameters, and their names in a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.base.errors import ShapeError, UsageError
from weft.base.parts import part_of
from weft.compiler import dtensors
from weft.runtime.world import World

KINDS = ("weight", "bias")


def check_divides(layer: str, name: str, size: int, world: World) -> int:
    """A rank's share of `size`.

    Raises  ShapeError: ranks that do not divide it
    """
    n = world.num_ranks
    if size % n:
        fit = ", ".join(str(one) for one in range(1, size + 1) if size % one == 0 and one <= 64)
        raise ShapeError(
            f"{layer}: {name}={size} over {n} ranks leaves {size % n} over; every rank must have "
            f"as many: take a world of {fit} ranks, or leave this module out of the plan"
        )
    return size // n


def seat_of(heads: int, world: World) -> tuple[int, int]:
    """(which, of how many): this rank's part of what lies by heads. Where there are fewer than
    ranks, and as many ranks to each, a head is several ranks'."""
    n = world.num_ranks
    return (world.rank * heads // n, heads) if heads < n and n % heads == 0 else (world.rank, n)


def whole(weight: Tensor) -> Tensor:
    """All of a weight; a DTensor is gathered."""
    return weight.full_tensor() if dtensors.is_dtensor(weight) else weight  # pyright: ignore


def shard_of(
    weight: Tensor, dim: int | None, world: World, seat: tuple[int, int] | None = None
) -> Tensor:
    """This rank's part of a weight along `dim`, or that of a seat, as torch.chunk splits it, in
    memory of its own; all of it where `dim` is None."""
    part = whole(weight.detach())
    if dim is not None:
        first, end = part_of(part.shape[dim], *(seat or (world.rank, world.num_ranks)))
        part = part.narrow(dim, first, end - first)
    device = part.device if part.is_meta else world.device
    return torch.empty_like(part, memory_format=torch.contiguous_format, device=device).copy_(part)


def like(part: Tensor, *given: Tensor) -> nn.Parameter:
    """A parameter that is trained if one of those that it was made of is."""
    return nn.Parameter(part, requires_grad=any(one.requires_grad for one in given))


def one_of(layer: str, module: nn.Module, *names: str) -> Any:
    """The first of these attributes that a module has.

    Raises  UsageError: it has none of them
    """
    for name in names:
        if (found := getattr(module, name, None)) is not None:
            return found
    there = ", ".join(name for name, _ in module.named_children()) or "no modules"
    raise UsageError(
        f"{layer}: {type(module).__name__} has none of {', '.join(names)} (it has {there}); make "
        f"the layer by its constructor, and give it this rank's parameters"
    )


def name_parts(module: nn.Module, child: str, rows: Mapping[str, int]) -> None:
    """Give the parameters of `child` the names of an ordinary module's parts in state dicts.

    rows: how many rows of child's parameters each part has, in order
    """
    module.register_state_dict_post_hook(partial(_split, child, dict(rows)))
    module.register_load_state_dict_pre_hook(partial(_join, child, dict(rows)))


def _split(
    child: str, rows: dict[str, int], _: nn.Module, found: dict[str, Any], prefix: str, *__: Any
) -> None:
    for kind in KINDS:
        if (one := found.pop(f"{prefix}{child}.{kind}", None)) is not None:
            parts = one.split(list(rows.values()))
            found |= {f"{prefix}{name}.{kind}": part for name, part in zip(rows, parts)}


def _join(
    child: str, rows: dict[str, int], _: nn.Module, found: dict[str, Any], prefix: str, *__: Any
) -> None:
    for kind in KINDS:
        names = [f"{prefix}{name}.{kind}" for name in rows]
        if all(name in found for name in names):
            found[f"{prefix}{child}.{kind}"] = torch.cat([found.pop(name) for name in names])
