"""Gradients on GPUs, under torchrun: of layers of products and of experts, eager and compiled.

Held to torch's own on all ranks' tensors together. Several steps, so that calls are replayed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import silu

import weft
from weft import ops

STEPS, EXPERTS, TOP_K = 4, 8, 2
# Of so much a gradient may be off: sums of bfloat16 products, rounded several times on their way.
TOLERANCE = 3e-2


def part(x: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """This rank's rows, as torch.chunk splits them."""
    rows = -(-x.shape[0] // num_ranks)
    return x[rank * rows : (rank + 1) * rows]


def dense(world: Any, m: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A layer on this rank, and the same of all ranks' weights."""

    def layer(x: Any, up: Any, down: Any) -> Any:
        return ops.gemm_rs(silu(ops.ag_gemm(x, up, world=world, m=m)), down, world=world)

    def alone(x: Any, ups: Any, downs: Any) -> Any:
        return sum(silu(x @ up) @ down for up, down in zip(ups, downs, strict=True))

    return layer, alone


def experts(world: Any, m: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    scores = torch.randn(m, EXPERTS, generator=torch.Generator().manual_seed(5)).to(world.device)
    weights, ids = scores.softmax(1).topk(TOP_K, 1)
    weights = (weights / weights.sum(1, keepdim=True)).unsqueeze(2)
    own = part(scores, world.rank, world.num_ranks).contiguous()

    def layer(x: Any, up: Any, down: Any) -> Any:
        routing = ops.moe_route(own, TOP_K, world=world, m=m)
        hidden = silu(ops.ag_moe(x, up, routing, world=world))
        return ops.moe_rs(hidden, down, routing, world=world)

    def alone(x: Any, ups: Any, downs: Any) -> Any:
        total = torch.zeros_like(x)
        for up, down in zip(ups, downs, strict=True):
            for expert in range(EXPERTS):
                share = (weights * (ids == expert).unsqueeze(2)).sum(1)
                total = total + share * (silu(x @ up[expert]) @ down[expert])
        return total

    return layer, alone


def drawn(world: Any, m: int, k: int, n: int, first: Sequence[int]) -> list[torch.Tensor]:
    """x and what results are multiplied by, of all ranks; every rank's weights."""
    generator = torch.Generator().manual_seed(m)
    count = world.num_ranks

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(world.device)

    ups, downs = normal(count, *first, k, n) / k**0.5, normal(count, *first, n, k) / n**0.5
    return [normal(m, k), normal(m, k), ups, downs]


def check(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    error = ((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-9)).item()
    assert error <= TOLERANCE, (what, error)


def cases(world: Any, sizes: Sequence[tuple[int, int, int]]) -> Iterator[tuple[Any, ...]]:
    for m, k, n in sizes:
        yield dense, (), m, k, n, False
    m, k, n = sizes[0]
    yield dense, (), m, k, n, True
    yield experts, (EXPERTS,), m, k, n, False


def main() -> None:
    small = "small" in sys.argv[1:]
    sizes = [(24, 32, 48), (9, 32, 16)] if small else [(1024, 512, 768), (997, 768, 512)]
    world, count = weft.init(), 0
    rank, num_ranks = world.rank, world.num_ranks
    for make, first, m, k, n, is_compiled in cases(world, sizes):
        x, given, ups, downs = drawn(world, m, k, n, first)
        layer, alone = make(world, m)
        leaves = [one.requires_grad_() for one in (x, ups, downs)]
        wanted = alone(*leaves)
        (wanted * given).sum().backward()
        half = torch.bfloat16
        own = [part(x, rank, num_ranks), ups[rank], downs[rank]]
        own = [one.detach().to(half).contiguous().requires_grad_() for one in own]
        expected = [part(x.grad, rank, num_ranks), ups.grad[rank], downs.grad[rank]]
        backend = "aot_eager" if small else "inductor"
        call = torch.compile(layer, backend=backend, fullgraph=True) if is_compiled else layer
        for _ in range(STEPS):
            out = call(*own)
            (out * part(given, rank, num_ranks).to(half)).sum().backward()
            check(out, part(wanted, rank, num_ranks), "result")
            for one, want, name in zip(own, expected, ("x", "up", "down"), strict=True):
                check(one.grad, want, f"{make.__name__} m={m}: {name}")
                one.grad = None
        count += 1
    print(f"rank {rank} of {num_ranks}: {count} cases")
    world.close()


if __name__ == "__main__":
    main()
