"""Flags that torch clears between two calls.

Suspicious  a plain write to a signal word, by the host's code
Right       barriers before it (the old signal has been used) and after it (no new one has come)
"""

import torch
import triton
from pieces import N, row, send, take

import weft.language as wl


@triton.jit
def exchange(world, x, ready, out, call):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, 1, to=1, op=wl.SignalOp.SET)
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)


def main(world):
    x, ready, out = row(world), world.signals(1), torch.empty(N)
    for call in range(3):
        exchange[(1,)](world.arg, x, ready, out, call)
        world.barrier()
        ready.zero_()
        world.barrier()
