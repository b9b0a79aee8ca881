"""A flag that is set once; every later call waits for it again.

Suspicious  waits that are satisfied by what an earlier call has left behind
Right       the data that it announces is never written again
"""

import torch
from pieces import N, announce, row, use


def main(world):
    x, ready = row(world), world.signals(1)
    announce[(1,)](world.arg, x, ready)
    for _ in range(3 * world.rank):
        use[(1,)](world.arg, x, ready, torch.empty(N))
