"""Epoch times count: right as long as every call has as many tiles as the one before.

Met in  counters that are never reset, once M changes from call to call
Found   the load of the second call, whose target was reached by the first call's larger count
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl

FOUND = "race"


@triton.jit
def exchange(world, x, ready, out, call, tiles, n: tl.constexpr):
    if wl.rank(world) == 0:
        for tile in range(tiles):
            send(world, x + tile * n, 1)
            wl.notify(world, ready, to=1)
    else:
        wl.wait(ready, at_least=call * tiles, world=world)
        for tile in range(tiles):
            take(x + tile * n, out)  # BUG: 2 calls of 1 tile are waited for, 3 tiles came before


def main(world):
    x, ready, out = world.zeros((3, N), torch.float32), world.signals(1), torch.empty(N)
    for call, tiles in ((1, 3), (2, 1)):
        exchange[(1,)](world.arg, x, ready, out, call, tiles, N)
