"""Copies by a second stream, whose words a kernel of the same device awaits at that device's scope.

The fault: the words come from a stream of another device, of which that scope knows nothing.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from launch import FAULT, start


@triton.jit
def double(x, out, words, N: tl.constexpr):
    pid, at = tl.program_id(0), tl.arange(0, N)
    while tl.atomic_add(words + pid, 0, sem="acquire", scope="gpu") == 0:  # FAULT
        pass
    tl.store(out + pid * N + at, 2 * tl.load(x + pid * N + at))


def main():
    rank, ranks, device = start()
    own = symm_mem.empty(16, device=device).fill_(1.0 + rank)
    x, out = symm_mem.empty(ranks, 16, device=device), torch.empty(ranks, 16, device=device)
    words = symm_mem.empty(ranks, dtype=torch.int32, device=device).zero_()
    owns, parts, flags = (symm_mem.rendezvous(one, dist.group.WORLD) for one in (own, x, words))
    parts.barrier()
    copies = torch.cuda.Stream()
    copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        for peer in range(ranks):
            if FAULT:
                parts.get_buffer(peer, (16,), torch.float32, 16 * rank).copy_(own)
                there = flags.get_buffer(peer, (ranks,), torch.int32)
                torch.ops.symm_mem.stream_write_value32_(there, rank, 1)
            else:
                x[peer].copy_(owns.get_buffer(peer, (16,), torch.float32))
                torch.ops.symm_mem.stream_write_value32_(words, peer, 1)
    double[(ranks,)](x, out, words, 16)
    torch.cuda.current_stream().wait_stream(copies)
    parts.barrier()
    expected = 2.0 * torch.arange(1.0, 1 + ranks).repeat_interleave(16).view(ranks, 16)
    torch.testing.assert_close(out.cpu(), expected)


if __name__ == "__main__":
    main()
