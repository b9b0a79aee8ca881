"""The same flag, set by a launch of its own in every round.

Suspicious  a later launch sets the word to what it is already
Right       whoever waits knows of that launch by the barrier
"""

import torch
import triton
from pieces import N, row, send, take

import weft.language as wl


@triton.jit
def exchange(world, x, ready):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, 1, to=1, op=wl.SignalOp.SET)


@triton.jit
def use(world, x, ready, out):
    wl.wait(ready, at_least=1, world=world)
    take(x, out)


def main(world):
    x, ready = row(world), world.signals(1)
    for _ in range(3):
        exchange[(1,)](world.arg, x, ready)
        world.barrier()
        if world.rank == 1:
            use[(1,)](world.arg, x, ready, torch.empty(N))
        world.barrier()
