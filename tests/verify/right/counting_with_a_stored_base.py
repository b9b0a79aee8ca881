"""A counter that is never reset, with another number of tiles in every call.

Suspicious  neither a reset, nor epoch times count
Right       the target is a stored base plus this call's count, and the call moves the base
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl


@triton.jit
def exchange(world, x, pushed, read, base, out, tiles, n: tl.constexpr):
    target = tl.load(base) + tiles
    if wl.rank(world) == 0:
        wl.wait(read, at_least=tl.load(base), world=world)
        for tile in range(tiles):
            send(world, x + tile * n, 1)
            wl.notify(world, pushed, to=1)
    else:
        wl.wait(pushed, at_least=target, world=world)
        for tile in range(tiles):
            take(x + tile * n, out)
        wl.notify(world, read, tiles, to=0)
    tl.store(base, target)


def main(world):
    x, base = world.zeros((5, N), torch.float32), torch.zeros(1, dtype=torch.int32)
    pushed, read, out = world.signals(1), world.signals(1), torch.empty(N)
    for tiles in (3, 1, 5, 0, 2):
        exchange[(1,)](world.arg, x, pushed, read, base, out, tiles, N)
