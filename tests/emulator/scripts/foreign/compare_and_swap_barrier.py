"""A barrier of one thread that exchanges words by compare-and-swap, a peer at a time, in Triton's
loops; data is written before it and read behind it, twice.

The fault: the barrier behind the reads is left out, so that a round overtakes the one before.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from launch import FAULT, start
from signals import get_flat_tid


@triton.jit
def exchange(word, old, new):
    return tl.inline_asm_elementwise(
        "atom.acq_rel.sys.global.cas.b32 $0, [$1], $2, $3;",
        "=r,l,r,r", [word, old, new], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def barrier(pads, rank, ranks: tl.constexpr):
    tl.debug_barrier()
    if get_flat_tid() == 0:
        for peer in range(ranks):
            there = tl.load(pads + peer).to(tl.pointer_type(tl.int32)) + rank
            while exchange(there, 0, 1) != 0:
                pass
        here = tl.load(pads + rank).to(tl.pointer_type(tl.int32))
        for peer in range(ranks):
            while exchange(here + peer, 1, 0) != 1:
                pass
    tl.debug_barrier()


@triton.jit
def rotate(buffers, pads, out, rank, ranks: tl.constexpr, N: tl.constexpr, FAULT: tl.constexpr):
    at = tl.arange(0, N)
    buffers, pads = (
        buffers.to(tl.pointer_type(tl.int64)), pads.to(tl.pointer_type(tl.int64)),
    )  # fmt: skip
    for turn in range(2):
        there = tl.load(buffers + (rank + 1) % ranks).to(tl.pointer_type(tl.int32))
        tl.store(there + at, at + rank + turn)  # FAULT
        barrier(pads, rank, ranks)
        here = tl.load(buffers + rank).to(tl.pointer_type(tl.int32))
        tl.store(out + turn * N + at, tl.load(here + at))
        if not FAULT:
            barrier(pads, rank, ranks)


def main():
    rank, ranks, device = start()
    row = symm_mem.empty(32, dtype=torch.int32, device=device)
    handle = symm_mem.rendezvous(row, dist.group.WORLD)
    out = torch.zeros(2, 32, dtype=torch.int32, device=device)
    rotate[(1,)](handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, out, rank, ranks, 32, FAULT)
    turns = torch.arange(2)[:, None] + torch.arange(32) + (rank - 1) % ranks
    torch.testing.assert_close(out.cpu(), turns.int())


if __name__ == "__main__":
    main()
