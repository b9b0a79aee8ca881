"""A count that is one too small: the last of several producers is not waited for.

Met in  all-reduces that count the peers and forget, or include, the own rank
Found   the load that meets the latest producer's store
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl

FOUND = "race"
RANKS = 3


@triton.jit
def gather(world, x, ready, out, n: tl.constexpr):
    if wl.rank(world) > 0:
        send(world, x + wl.rank(world) * n, 0)
        wl.notify(world, ready, to=0)
    else:
        wl.wait(ready, at_least=1, world=world)
        for peer in range(1, wl.num_ranks(world)):
            take(x + peer * n, out)  # BUG: waited for one of two


def main(world):
    x = world.zeros((world.num_ranks, N), torch.float32)
    gather[(1,)](world.arg, x, world.signals(1), torch.empty(N), N)
