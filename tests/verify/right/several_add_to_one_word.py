"""All ranks add to one counter; one wait for their sum.

Suspicious  releases of different ranks meet in one word
Right       whoever waits for the sum sees what all of them wrote
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl

RANKS = 4


@triton.jit
def gather(world, x, ready, out, n: tl.constexpr):
    ranks = wl.num_ranks(world)
    send(world, x + wl.rank(world) * n, 0)
    wl.notify(world, ready, to=0)
    if wl.rank(world) == 0:
        wl.wait(ready, at_least=ranks, world=world)
        for source in range(ranks):
            take(x + source * n, out)


def main(world):
    x = world.zeros((world.num_ranks, N), torch.float32)
    gather[(1,)](world.arg, x, world.signals(1), torch.empty(N), N)
