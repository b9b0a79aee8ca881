"""A tile at a time from rank to rank by a table of addresses and Triton's own atomics.

The fault: the flag is set at the scope of one GPU, Triton's default.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from launch import FAULT, start


@triton.jit
def produce(bases, flags, rank, TILE: tl.constexpr, SCOPE: tl.constexpr):
    pid, at = tl.program_id(0), tl.arange(0, TILE)
    other = (rank + 1) % 2
    peer = tl.load(bases + other).to(tl.pointer_type(tl.float32))
    tl.store(peer + pid * TILE + at, at + 10.0 * pid + 100.0 * rank)
    tl.debug_barrier()
    flag = tl.load(flags + other).to(tl.pointer_type(tl.int32)) + pid
    tl.atomic_xchg(flag, 1, sem="release", scope=SCOPE)  # FAULT


@triton.jit
def consume(buffer, flag, out, TILE: tl.constexpr):
    pid, at = tl.program_id(0), tl.arange(0, TILE)
    while tl.atomic_add(flag + pid, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.debug_barrier()
    tl.store(out + pid * TILE + at, tl.load(buffer + pid * TILE + at))


def main():
    rank, _, device = start()
    buffer = symm_mem.empty(4, 16, device=device)
    flag = symm_mem.empty(4, dtype=torch.int32, device=device)
    handles = [symm_mem.rendezvous(each, dist.group.WORLD) for each in (buffer, flag)]
    buffer.zero_()
    flag.zero_()
    handles[1].barrier()
    bases, flags = (torch.tensor(each.buffer_ptrs, device=device) for each in handles)
    out, other = torch.empty(4, 16, device=device), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        produce[(4,)](bases=bases, flags=flags, rank=rank, TILE=16, SCOPE="gpu" if FAULT else "sys")
    consume[(4,)](buffer=buffer, flag=flag, out=out, TILE=16)
    torch.cuda.synchronize()
    rows = torch.arange(4)[:, None] * 10.0 + torch.arange(16) + 100.0 * (1 - rank)
    torch.testing.assert_close(out.cpu(), rows)


if __name__ == "__main__":
    main()
