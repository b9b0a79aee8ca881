"""A wait for 1 that sees 3.

Suspicious  the value that was waited for has come and gone
Right       waits say at least; the later values were added on top, so the first release counts
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl


@triton.jit
def exchange(world, x, pushed, out, n: tl.constexpr):
    if wl.rank(world) == 0:
        for tile in range(3):
            send(world, x + tile * n, 1)
            wl.notify(world, pushed, to=1)
        wl.barrier(world)
    else:
        wl.barrier(world)
        wl.wait(pushed, at_least=1, world=world)
        take(x, out)


def main(world):
    x = world.zeros((3, N), torch.float32)
    exchange[(1,)](world.arg, x, world.signals(1), torch.empty(N), N)
