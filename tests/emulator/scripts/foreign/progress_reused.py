"""Two steps over one array of progress words, which a second stream sets as its copies get there.

The fault: the words are not set back in between, and the second step's waits see the first one's.
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
    while tl.atomic_add(words + pid, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.store(out + pid * N + at, 2 * tl.load(x + pid * N + at))  # FAULT


def main():
    rank, ranks, device = start()
    own = symm_mem.empty(16, device=device)
    handle = symm_mem.rendezvous(own, dist.group.WORLD)
    x, out = (torch.empty(ranks, 16, device=device) for _ in range(2))
    words = torch.zeros(ranks, dtype=torch.int32, device=device)
    copies = torch.cuda.Stream()
    for step in range(2):
        own.fill_(rank + 10.0 * step)
        if not FAULT:
            words.zero_()
        handle.barrier()
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            for peer in range(ranks):
                x[peer].copy_(handle.get_buffer(peer, (16,), torch.float32))
                handle.stream_write_value32(words, peer, 1)
        double[(ranks,)](x, out, words, 16)
        torch.cuda.current_stream().wait_stream(copies)
        handle.barrier()
        if not FAULT:
            expected = 2 * (torch.arange(float(ranks)) + 10 * step).repeat_interleave(16)
            torch.testing.assert_close(out.cpu().view(-1), expected)


if __name__ == "__main__":
    main()
