"""Words by volatile accesses, ordered by `membar`, as before there were orders.

The fault: `membar.cta` where another GPU reads.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from launch import FAULT, start


@triton.jit
def membar(scope: tl.constexpr):
    tl.inline_asm_elementwise(f"membar.{scope};", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def swap(buffers, pads, out, rank, N: tl.constexpr, SCOPE: tl.constexpr):
    at = tl.arange(0, N)
    buffers, pads = (
        buffers.to(tl.pointer_type(tl.int64)), pads.to(tl.pointer_type(tl.int64)),
    )  # fmt: skip
    other = (rank + 1) % 2
    tl.store(tl.load(buffers + other).to(tl.pointer_type(tl.float32)) + at, at + 0.5)
    membar(SCOPE)
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        """
        {
            .reg .b32 seen; .reg .pred p;
            st.volatile.global.b32 [$1], 1;
            again: ld.volatile.global.b32 seen, [$2];
            setp.ne.s32 p, seen, 1;
            @p bra again;
        }
        """,
        "=r,l,l", [tl.load(pads + other), tl.load(pads + rank)], tl.int32, False, 1,
    )  # fmt: skip
    membar("sys")
    tl.debug_barrier()
    here = tl.load(buffers + rank).to(tl.pointer_type(tl.float32))
    tl.store(out + at, tl.load(here + at))  # FAULT


def main():
    rank, _, device = start()
    row = symm_mem.empty(16, device=device)
    handle = symm_mem.rendezvous(row, dist.group.WORLD)
    row.zero_()
    out = torch.zeros_like(row)
    handle.barrier()
    pointers = handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev
    swap[(1,)](*pointers, out, rank, 16, "cta" if FAULT else "sys")
    torch.testing.assert_close(out.cpu(), torch.arange(16) + 0.5)


if __name__ == "__main__":
    main()
