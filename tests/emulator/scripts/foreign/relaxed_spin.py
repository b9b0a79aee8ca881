"""A row goes to the next rank; it spins on relaxed loads, and a fence behind them acquires.

The fault: there is no fence.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from launch import FAULT, start


@triton.jit
def pass_on(buffers, pads, out, rank, ranks, N: tl.constexpr, FAULT: tl.constexpr):
    at, following = tl.arange(0, N), (rank + 1) % ranks
    buffers, pads = (
        buffers.to(tl.pointer_type(tl.int64)), pads.to(tl.pointer_type(tl.int64)),
    )  # fmt: skip
    there = tl.load(buffers + following).to(tl.pointer_type(tl.float32))
    tl.store(there + at, at.to(tl.float32) + rank)
    tl.debug_barrier()
    flag = tl.load(pads + following).to(tl.pointer_type(tl.uint32))
    tl.inline_asm_elementwise(
        "st.release.sys.global.u32 [$1], 1;", "=r,l", [flag], tl.int32, is_pure=False, pack=1
    )
    flag = tl.load(pads + rank).to(tl.pointer_type(tl.uint32))
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred %p<1>;
            wait_block:
                ld.global.relaxed.sys.u32 $0, [$1];
                setp.eq.u32 %p0, $0, 1;
                @!%p0 bra wait_block;
        }
        """,
        "=r, l", [flag], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    if not FAULT:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    here = tl.load(buffers + rank).to(tl.pointer_type(tl.float32))
    tl.store(out + at, tl.load(here + at))  # FAULT


def main():
    rank, ranks, device = start()
    row = symm_mem.empty(64, device=device)
    handle = symm_mem.rendezvous(row, dist.group.WORLD)
    out = torch.zeros(64, device=device)
    row.zero_()
    handle.barrier()
    pass_on[(1,)](handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, out, rank, ranks, 64, FAULT)
    expected = torch.arange(64, device=device) + float((rank - 1) % ranks)
    torch.testing.assert_close(out, expected)


if __name__ == "__main__":
    main()
