"""Two sub-groups that use one signal word of the world that holds both: their signals mix.

Met in  tensor- and data-parallel groups over one buffer, numbered by the rank in the group
Found   the load: the signal that came was the other group's
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl

FOUND = "race"
RANKS = 4


@triton.jit
def exchange(world, x, ready, out, n: tl.constexpr):
    """Groups are ranks 0, 1 and ranks 2, 3; rank 0 collects for both."""
    rank = wl.rank(world)
    group, rank_in_group = rank // 2, rank % 2
    if rank_in_group == 1:
        send(world, x + group * n, 0)
        wl.notify(world, ready, to=0)
    elif rank == 0:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)  # BUG: this may be the signal of group 1


def main(world):
    x = world.zeros((2, N), torch.float32)
    exchange[(1,)](world.arg, x, world.signals(1), torch.empty(N), N)
