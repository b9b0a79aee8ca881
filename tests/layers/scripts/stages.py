"""A model in stages, under torchrun or emulated: one stage to a rank and several, eager and
recorded, held to one process that has all stages.

    torchrun --nproc-per-node 2 tests/layers/scripts/stages.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import weft
from weft.layers import Pipeline

ROWS, TURNS = 16, 2
# Products of the same sizes on one device are the same; their sums may be made in other orders.
TOLERANCE = 1e-5


def stages_of(world: Any, count: int, hidden: int) -> list[nn.Module]:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(hidden, hidden), nn.GELU()) for _ in range(count)]
    return [one.to(world.device) for one in made]


def far(got: Any, want: Any) -> float:
    return float((got - want).norm() / (want.norm() + 1e-12))


def check(world: Any, chunks: int, microbatches: int, hidden: int) -> int:
    """Gradients are added up over all steps, in eager ones and in replayed ones."""
    n, rank = world.num_ranks, world.rank
    count = n * chunks
    mine, wanted = (stages_of(world, count, hidden) for _ in range(2))
    inputs = [torch.randn(ROWS, hidden).to(world.device) for _ in range(microbatches)]
    targets = [torch.randn(ROWS, hidden).to(world.device) for _ in range(microbatches)]
    mine, whole = mine[rank::n], nn.Sequential(*wanted)
    pipeline = Pipeline(
        mine, world, shape=(ROWS, hidden), microbatches=microbatches, loss=functional.mse_loss
    )

    def alone() -> torch.Tensor:
        total = torch.zeros((), device=world.device)
        for x, target in zip(inputs, targets, strict=True):
            loss = functional.mse_loss(whole(x), target) / microbatches
            loss.backward()
            total = total + loss.detach()
        return total

    def compare(total: torch.Tensor) -> None:
        want = alone()
        assert rank < n - 1 or far(total, want) < TOLERANCE, (total, want)
        for own, other in zip(mine, wanted[rank::n], strict=True):
            for one, right in zip(own.parameters(), other.parameters(), strict=True):
                assert far(one.grad, right.grad) < TOLERANCE, far(one.grad, right.grad)

    for _ in range(TURNS):
        compare(pipeline.step(inputs, targets))
    with world.record() as recording:
        total = pipeline.step(inputs, targets)
    for _ in range(TURNS):
        recording.replay()
        compare(total)
    return 1


def main() -> None:
    world = weft.init(heap_bytes=64 << 20)
    n, count = world.num_ranks, 0
    hidden = 8 if world.device.type == "cpu" else 512
    for chunks, microbatches in ((1, 3), (2, 2 * n), (3, n)):
        count += check(world, chunks, microbatches, hidden)
    world.synchronize()
    print(f"rank {world.rank} of {n}: {count} cases", flush=True)
    world.close()


if __name__ == "__main__":
    main()
