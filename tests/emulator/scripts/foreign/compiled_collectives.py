"""Collectives that torch has compiled for CUDA (torch.ops.symm_mem), one after the other.

The fault: what they leave is overwritten by a peer, behind no barrier.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from launch import FAULT, start


def main():
    rank, ranks, device = start()
    group = dist.group.WORLD
    x = symm_mem.empty(ranks * 8, device=device)
    handle = symm_mem.rendezvous(x, group)
    own = torch.arange(ranks * 8.0, device=device) * (rank + 1)
    expected = torch.arange(ranks * 8.0) * sum(range(1, ranks + 1))

    x.copy_(own)
    one = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group.group_name)
    torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group.group_name)
    if FAULT:
        handle.get_buffer((rank + 1) % ranks, x.shape, x.dtype).copy_(own)
    double = 2 * x  # FAULT
    if not FAULT:
        torch.testing.assert_close(one.cpu(), expected)
        torch.testing.assert_close(double.cpu(), 2 * expected)
    gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
        own.view(8, -1), [torch.eye(ranks, device=device)], 0, group.group_name
    )
    torch.testing.assert_close(gathered, product)


if __name__ == "__main__":
    main()
