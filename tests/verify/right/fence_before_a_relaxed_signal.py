"""A put, a fence, and a relaxed signal.

Suspicious  the signal is relaxed
Right       whoever sees a signal sent after the fence sees what was put before it
"""

import torch
import triton
from pieces import N, lanes, row, take

import weft.language as wl


@triton.jit
def exchange(world, x, source, ready, out):
    if wl.rank(world) == 0:
        wl.put(world, x + lanes(), source + lanes(), to=1)
        wl.fence(world)
        wl.notify(world, ready, to=1, order=wl.Order.RELAXED)
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)


def main(world):
    exchange[(1,)](world.arg, row(world), torch.ones(N), world.signals(1), torch.empty(N))
