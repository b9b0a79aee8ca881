"""Each thread signals a peer of its own, and one waits for the sum: epochs that only grow.

The fault: one thread too few signals.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from launch import FAULT, start
from signals import get_flat_tid


@triton.jit
def await_count(word, count):
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred p;
            again: ld.acquire.sys.global.u32 $0, [$1];
            setp.lt.u32 p, $0, $2;
            @p bra again;
        }
        """,
        "=r,l,r", [word, count], tl.int32, False, 1,
    )  # fmt: skip


@triton.jit
def gather(buffers, pads, rank, ranks, epoch, N: tl.constexpr, FAULT: tl.constexpr):
    at, tid = tl.arange(0, N), get_flat_tid()
    buffers, pads = (
        buffers.to(tl.pointer_type(tl.int64)), pads.to(tl.pointer_type(tl.int64)),
    )  # fmt: skip
    for peer in range(ranks):
        there = tl.load(buffers + peer).to(tl.pointer_type(tl.int32))
        tl.store(there + (epoch % 2 * ranks + rank) * N + at, at + rank + epoch)
    tl.debug_barrier()
    if tid < (ranks - 1 if FAULT else ranks):
        tl.inline_asm_elementwise(
            "red.release.sys.global.add.u32 [$1], 1;", "=r,l", [tl.load(pads + tid)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if tid == 0:
        await_count(tl.load(pads + rank), ranks * (epoch + 1))  # FAULT
    tl.debug_barrier()


def main():
    rank, ranks, device = start()
    rows = symm_mem.empty(2, ranks, 8, dtype=torch.int32, device=device)
    handle = symm_mem.rendezvous(rows, dist.group.WORLD)
    pointers = handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev
    for epoch in range(3):
        gather[(1,)](*pointers, rank, ranks, epoch, 8, FAULT)
        expected = torch.arange(ranks)[:, None] + torch.arange(8) + epoch
        torch.testing.assert_close(rows[epoch % 2].cpu(), expected.int())
        handle.barrier()


if __name__ == "__main__":
    main()
