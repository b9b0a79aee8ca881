"""A heap that starts small and grows: tensors, signals and operators in its further segments.

Under torchrun or emulated:

torchrun --nproc-per-node 2 tests/runtime/scripts/heap_that_grows.py
"""

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.ops import ag_gemm, gemm_rs

MIB = 1 << 20


@triton.jit
def send(world, rows, inbox, ready, size: tl.constexpr):
    peer = (wl.rank(world) + 1) % wl.num_ranks(world)
    at = tl.arange(0, size)
    wl.put(world, inbox + at, tl.load(rows + at), to=peer)
    wl.notify(world, ready, to=peer)
    wl.wait(ready, at_least=1, world=world)


def main() -> None:
    emulated = weft.init(heap_bytes=MIB).target.backend == "emu"
    first, limit = (MIB, 32 * MIB) if emulated else (8 * MIB, 2048 * MIB)
    with weft.init(heap_bytes=first, heap_limit=limit) as world:
        before = world.empty((256,), torch.float32)
        pointers = world.pointers(before).tolist()
        far = world.empty((first + 4096,), torch.uint8)
        assert world.offset(far) > first, "in a segment of its own"
        rows, inbox = (world.empty((64,), torch.float32) for _ in range(2))
        ready = world.signals(1)
        before.fill_(world.rank)
        rows.fill_(world.rank + 1)
        far.fill_(world.rank)
        world.barrier()
        left = (world.rank - 1) % world.num_ranks
        send[(1,)](world.arg, rows, inbox, ready, 64)
        assert (inbox == left + 1).all(), "by kernels"
        for tensor in (before, far):
            there = world.peer(tensor, left)
            mine = torch.empty_like(tensor)
            world.copy(mine, there)
            assert (mine == left).all(), "by copy engines"
        assert world.pointers(before).tolist() == pointers, "addresses stay"
        world.barrier()
        # Operators, each size in more memory than there was.
        width, dtype = (16, torch.float32) if emulated else (1024, torch.bfloat16)
        b = torch.full((width, width), 1 / width, dtype=dtype, device=world.device)
        sizes = [4096] if emulated else [2048 << i for i in range(4)]
        for m in sizes:
            a = torch.full((m, width), 2.0, dtype=dtype, device=world.device)
            for _ in range(2):
                assert (ag_gemm(a[: m // world.num_ranks], b, world=world) == 2).all()
                assert (gemm_rs(a, b, world=world) == 2 * world.num_ranks).all()
        world.synchronize()
        print(f"rank {world.rank} of {world.num_ranks}: {world.heap_bytes // MIB} MiB")
        kept = rows
    assert kept.sum() == 64 * (world.rank + 1), "tensors outlive their world"


if __name__ == "__main__":
    main()
