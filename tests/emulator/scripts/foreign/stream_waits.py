"""A kernel makes chunks; a second stream waits for the word of each, then copies it to a peer.

The fault: a copy starts without its wait.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from cuda.bindings import driver
from launch import FAULT, start

EQUAL = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ


@triton.jit
def produce(out, progress, rank, N: tl.constexpr):
    pid, at = tl.program_id(0), tl.arange(0, N)
    tl.store(out + pid * N + at, at + 10.0 * pid + 100.0 * rank)
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        "st.release.sys.global.u32 [$1], 1;", "=r,l", [progress + pid], tl.int32, False, 1
    )


def main():
    rank, ranks, device = start()
    inbox = symm_mem.empty(ranks, 16, device=device)
    handle = symm_mem.rendezvous(inbox, dist.group.WORLD)
    mine = torch.empty(ranks, 16, device=device)
    progress = torch.zeros(ranks, dtype=torch.int32, device=device)
    copies = torch.cuda.Stream()
    copies.wait_stream(torch.cuda.current_stream())
    produce[(ranks,)](mine, progress, rank, 16)
    with torch.cuda.stream(copies):
        for peer in range(ranks):
            if not FAULT:
                word = progress.data_ptr() + 4 * peer
                driver.cuStreamWaitValue32(copies.cuda_stream, word, 1, EQUAL)
            handle.get_buffer(peer, (16,), torch.float32, 16 * rank).copy_(mine[peer])  # FAULT
        handle.barrier()
    torch.cuda.current_stream().wait_stream(copies)
    expected = torch.arange(16.0) + 10.0 * rank + 100.0 * torch.arange(ranks)[:, None]
    torch.testing.assert_close(inbox.cpu(), expected)


if __name__ == "__main__":
    main()
