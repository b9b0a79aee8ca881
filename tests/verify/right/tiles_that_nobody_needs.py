"""A producer announces eight tiles one by one; the consumer needs the first five.

Suspicious  the counter ends larger than anybody waits for
Right       between two signals there was something to announce
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl


@triton.jit
def exchange(world, x, pushed, out, tiles, needed, n: tl.constexpr):
    if wl.rank(world) == 0:
        for tile in range(tiles):
            send(world, x + tile * n, 1)
            wl.notify(world, pushed, to=1)
    else:
        wl.wait(pushed, at_least=needed, world=world)
        for tile in range(needed):
            take(x + tile * n, out)


def main(world):
    x = world.zeros((8, N), torch.float32)
    exchange[(1,)](world.arg, x, world.signals(1), torch.empty(N), 8, 5, N)
