"""A one-shot all-reduce over symmetric memory: every rank reads all buffers between two barriers.

The fault: the first barrier is relaxed, as if nobody read behind it.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from launch import FAULT, start
from signals import symm_mem_sync


@triton.jit
def all_reduce(
    buffer_ptrs, signal_pad_ptrs, out, numel, rank: tl.constexpr, world_size: tl.constexpr,
    BLOCK: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    symm_mem_sync(signal_pad_ptrs, pid, rank, world_size, False, not FAULT)
    buffers = buffer_ptrs.to(tl.pointer_type(tl.uint64))
    for start_at in range(pid * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start_at + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(world_size):
            there = tl.load(buffers + peer).to(tl.pointer_type(tl.bfloat16))
            total += tl.load(there + at, mask=at < numel, other=0.0).to(tl.float32)  # FAULT
        tl.store(out + at, total.to(tl.bfloat16), mask=at < numel)
    symm_mem_sync(signal_pad_ptrs, pid, rank, world_size, True, False)


def main():
    rank, world_size, device = start()
    inputs = symm_mem.empty(1000, dtype=torch.bfloat16, device=device)
    handle = symm_mem.rendezvous(inputs, dist.group.WORLD)
    out = torch.empty_like(inputs)
    for turn in range(2):
        inputs.fill_(rank + turn)
        all_reduce[(4,)](
            handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, out, out.numel(), rank=rank,
            world_size=world_size, BLOCK=128, FAULT=FAULT, num_warps=2,
        )  # fmt: skip
        expected = sum(range(turn, world_size + turn))
        torch.testing.assert_close(out, torch.full_like(out, expected))
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
