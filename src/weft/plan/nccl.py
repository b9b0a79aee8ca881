"""Collectives by torch.distributed, as a transport among others: where it was measured to be best.

Not an operator. Sums are then made as the library makes them: in its order, and in its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

TRANSPORT = "nccl"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _of_values(collective: Callable[..., None]) -> Callable[..., None]:
    """Nothing of tensors without memory, where a call is described."""

    @wraps(collective)
    def run(world: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        if not x.is_meta:
            collective(world, x, out)

    return run


@_of_values
def all_gather(world: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    dist.all_gather_into_tensor(_bits(out), _bits(x), group=world.backend.group)


@_of_values
def all_to_all(world: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    dist.all_to_all_single(_bits(out), _bits(x), group=world.backend.group)


@_of_values
def all_reduce(world: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    dist.all_reduce(out, group=world.backend.group)


@_of_values
def reduce_scatter(world: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(out, x, group=world.backend.group)


BY_NAME = {
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
}
