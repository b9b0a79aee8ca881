"""The same flag, set by a launch of its own in every round.

Suspicious  a later launch sets the word to what it is already
Right       whoever waits knows of that launch by the barrier
"""

import torch
from pieces import N, announce, row, use


def main(world):
    x, ready = row(world), world.signals(1)
    for _ in range(3):
        announce[(1,)](world.arg, x, ready)
        world.barrier()
        if world.rank == 1:
            use[(1,)](world.arg, x, ready, torch.empty(N))
        world.barrier()
