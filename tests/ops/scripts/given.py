"""DTensors and torch.autocast, under torchrun or on emulated ranks: a layer, eager and compiled.

    torchrun --nproc-per-node 2 tests/ops/scripts/given.py

The layer of DTensors gives what that of their parts does; under autocast that of float32 weights
what that of converted ones does. Several steps, so that calls are replayed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import silu

import weft
from weft import ops

STEPS, M, K, N = 3, 128, 64, 128
# Sums of bfloat16 products in another order, and what inductor fuses it rounds less often.
TOLERANCE = 3e-2


def gradients_of(call: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """[result, gradient of each leaf], of plain tensors."""
    out = call(*leaves)
    out.float().square().sum().backward()
    found = [out.detach()]
    for one in leaves:
        gradient, one.grad = one.grad, None
        assert gradient is not None and gradient.dtype == one.dtype
        found.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return found


def main() -> None:
    world, count = weft.init(), 0
    rank, num_ranks, device = world.rank, world.num_ranks, world.device
    mesh = DeviceMesh(device.type, list(range(num_ranks)))
    generator = torch.Generator().manual_seed(rank)
    shapes = [(M // num_ranks, K), (K, N), (N, K)]
    parts = [(torch.randn(shape, generator=generator) / 8).to(device) for shape in shapes]
    placements = [Shard(0), Shard(1), Shard(0)]

    def layer(x: Any, up: Any, down: Any) -> Any:
        return ops.gemm_rs(silu(ops.ag_gemm(x, up, world=world)), down, world=world)

    def narrowed(*tensors: Any) -> Any:
        return layer(*(one.bfloat16() for one in tensors))

    def automatic(*tensors: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return layer(*tensors)

    compiled = torch.compile(layer, fullgraph=True)
    for dtype, plain, calls in (
        (torch.bfloat16, layer, (layer, compiled)),
        (torch.float32, narrowed, (automatic,)),
    ):
        own = [one.to(dtype).requires_grad_() for one in parts]
        spread = [
            DTensor.from_local(one.detach(), mesh, [placement]).requires_grad_()
            for one, placement in zip(own, placements, strict=True)
        ]
        wanted = gradients_of(plain, own)
        for call in calls:
            for leaves in (own, spread):
                for _ in range(STEPS):
                    got = gradients_of(call, leaves)
                    for one, want in zip(got, wanted, strict=True):
                        assert one.dtype == want.dtype and one.shape == want.shape
                        off = (one - want).abs().max().item()
                        assert off <= TOLERANCE * want.abs().max().item(), (call, off)
                count += 1
    print(f"rank {rank} of {num_ranks}: {count} cases")
    world.close()


if __name__ == "__main__":
    main()
