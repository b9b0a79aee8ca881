"""Gradients of operators, held to torch's own of the same formula on global tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def whole(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers: sums of products are exact in any order, so results are bitwise."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def shard(x: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """This rank's rows, as torch.chunk splits them."""
    rows = -(-x.shape[0] // num_ranks)
    return x[rank * rows : (rank + 1) * rows]


def leaf(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory of their own, laid out alike, with a gradient to come."""
    return torch.empty_like(x.detach()).copy_(x.detach()).requires_grad_()


def gradients(call: Callable[..., Any], leaves: Sequence[torch.Tensor], given: Any) -> list[Any]:
    """[result.., gradient of each leaf] of sum(result * given)."""
    made = call(*leaves)
    results, weights = (x if isinstance(x, (tuple, list)) else (x,) for x in (made, given))
    loss = sum((one * weight).sum() for one, weight in zip(results, weights, strict=True))
    loss.backward()
    return [*(one.detach() for one in results), *(one.grad for one in leaves)]


def same(got: Sequence[Any], want: Sequence[Any]) -> None:
    """Bitwise, result by result, gradient by gradient."""
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert torch.equal(one, other), (one, other)
