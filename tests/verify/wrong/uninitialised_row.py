"""A read of what nobody has written: the row of a rank that had nothing to send.

Met in  gathers with empty shards, whose rows are summed up with all the others
Found   the load of unwritten memory
"""

import torch
import triton
import triton.language as tl
from pieces import N, take

import weft.language as wl

FOUND = "uninitialised"


@triton.jit
def exchange(world, x, ready, out, n: tl.constexpr):
    if wl.rank(world) == 0:
        wl.notify(world, ready, to=1)
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)  # BUG: rank 0 has not sent one


def main(world):
    x = world.empty((N,), torch.float32)  # no zeros: every row is to be sent
    exchange[(1,)](world.arg, x, world.signals(1), torch.empty(N), N)
