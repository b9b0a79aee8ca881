"""A two-shot all-reduce by torch operations on peers' buffers, with barriers of the handle.

The fault: nobody waits between the two shots.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from launch import FAULT, start


def main():
    rank, ranks, device = start()
    rows, width = ranks, 8
    symm = symm_mem.empty(rows, width, device=device)
    handle = symm_mem.rendezvous(symm, group=dist.group.WORLD.group_name)
    symm.copy_(torch.arange(rows, device=device)[:, None] + torch.full((rows, width), rank))
    peers = [handle.get_buffer(peer, symm.shape, symm.dtype) for peer in range(ranks)]
    handle.barrier(channel=0)
    symm[rank].copy_(torch.stack([peer[rank] for peer in peers]).sum(0))
    if not FAULT:
        handle.barrier(channel=0)
    out = torch.stack([peers[row][row] for row in range(rows)])  # FAULT
    handle.barrier(channel=1)
    expected = torch.arange(rows) * float(ranks) + sum(range(ranks))
    torch.testing.assert_close(out.cpu(), expected[:, None].expand(rows, width))


if __name__ == "__main__":
    main()
