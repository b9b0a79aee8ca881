"""A copy engine pushes rows and then a word, which a kernel waits for.

Suspicious  no kernel signals
Right       the word is copied behind the data, on the same stream
"""

import torch
import triton
from pieces import N, row, take

import weft.language as wl


@triton.jit
def receive(world, x, ready, out):
    wl.wait(ready, at_least=1, world=world)
    take(x, out)


def main(world):
    x, ready, one = row(world), world.signals(1, torch.int64), world.signals(1, torch.int64)
    one.fill_(1)
    if world.rank == 0:
        world.copy(world.peer(x, 1), torch.ones(N))
        world.copy_word(world.peer(ready, 1), one)
    else:
        receive[(1,)](world.arg, x, ready, torch.empty(N))
