"""A ring of pushes: a copy to the next rank, then `put_signal`; there `wait_signal`, then a read.

The fault: the signal is put before the copy.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from launch import FAULT, start


def main():
    rank, ranks, device = start()
    following, preceding = (rank + 1) % ranks, (rank - 1) % ranks
    inbox = symm_mem.empty(16, device=device)
    handle = symm_mem.rendezvous(inbox, dist.group.WORLD)
    there = handle.get_buffer(following, inbox.shape, inbox.dtype)
    mine = torch.full((16,), float(rank), device=device)
    for _ in range(ranks):
        if FAULT:
            handle.put_signal(following)
        there.copy_(mine)
        if not FAULT:
            handle.put_signal(following)
        handle.wait_signal(preceding)
        mine = inbox * 1.0  # FAULT
        handle.put_signal(preceding, channel=1)
        handle.wait_signal(following, channel=1)
    torch.testing.assert_close(mine.cpu(), torch.full((16,), float(rank)))


if __name__ == "__main__":
    main()
