"""NVSHMEM's device functions, as torch has them for Triton: a ring of puts, each with its signal.

The fault: a put, and then the signal by itself, with no fence in between.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from launch import FAULT, start
from torch.distributed._symmetric_memory import _nvshmem_triton as nvshmem


@nvshmem.requires_nvshmem
@triton.jit
def ring(inbox, x, out, flag, N: tl.constexpr, SEPARATE: tl.constexpr):
    peer = (nvshmem.my_pe() + 1) % nvshmem.n_pes()
    if SEPARATE:
        nvshmem.put(inbox, x, tl.full((), N, tl.int32), peer)
        nvshmem.signal_op(flag.to(tl.int64), tl.full((), 1, tl.int64), 0, peer)
    else:
        nvshmem.putmem_signal_block(inbox, x, tl.full((), 4 * N, tl.int64), flag, 1, 0, peer)
    nvshmem.signal_wait_until(flag, 0, 1)
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(inbox + at))  # FAULT


@nvshmem.requires_nvshmem
@triton.jit
def total(out, x, count):
    nvshmem.reduce(0, out, x, count, "sum")


def main():
    rank, ranks, device = start()
    symm_mem.set_backend("NVSHMEM")
    assert symm_mem.is_nvshmem_available()
    x = symm_mem.empty(16, device=device).fill_(rank + 1.0)
    inbox = symm_mem.empty(16, device=device)
    symm_mem.rendezvous(x, dist.group.WORLD)
    handle = symm_mem.rendezvous(inbox, dist.group.WORLD)
    flag = handle.get_signal_pad(rank, (1,), torch.int64)
    handle.barrier()
    out = torch.empty(16, device=device)
    ring[(1,)](inbox, x, out, flag, 16, FAULT)
    if not FAULT:
        torch.testing.assert_close(out.cpu(), torch.full((16,), (rank - 1) % ranks + 1.0))
    total[(1,)](inbox, x, 16)
    torch.testing.assert_close(inbox.cpu(), torch.full((16,), float(sum(range(1, ranks + 1)))))


if __name__ == "__main__":
    main()
