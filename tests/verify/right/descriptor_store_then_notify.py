"""An asynchronous (TMA) store, announced by wl.notify with nothing in between.

Suspicious  the store may be under way when the signal is sent
Right       notify completes the program's asynchronous stores
"""

import torch
import triton
import triton.language as tl
from pieces import N, take

import weft.language as wl


@triton.jit
def exchange(world, x, ready, out, n: tl.constexpr):
    if wl.rank(world) == 0:
        theirs = tl.make_tensor_descriptor(wl.at(world, x, 1), [n, n], [n, 1], [n, n])
        theirs.store([0, 0], tl.full([n, n], 1.0, tl.float32))
        wl.notify(world, ready, to=1)
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)


def main(world):
    x = world.zeros((N, N), torch.float32)
    exchange[(1,)](world.arg, x, world.signals(1), torch.empty(N), N)
