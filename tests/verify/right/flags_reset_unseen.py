"""Flags that some ranks never look at, reset by torch between barriers, round after round.

Suspicious  signals that are taken away before anybody has seen them
Right       nobody waits for them on that rank
"""

import torch
import triton
from pieces import N, row, send, take

import weft.language as wl

RANKS = 3


@triton.jit
def exchange(world, x, ready, out):
    rank = wl.rank(world)
    if rank == 0:
        for peer in range(1, wl.num_ranks(world)):
            send(world, x, peer)
            wl.notify(world, ready, to=peer)
    elif rank == 1:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)


def main(world):
    x, ready, out = row(world), world.signals(1), torch.empty(N)
    for _ in range(3):
        exchange[(1,)](world.arg, x, ready, out)
        world.barrier()
        ready.zero_()
        world.barrier()
