"""A tile that straddles two chunks and waits for the first one only.

Met in  gathered GEMMs where the rows of a rank are no multiple of the tile
Found   the load of the rows that belong to the second chunk
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl

FOUND = "race"
RANKS = 3


@triton.jit
def gather(world, x, ready, out, n: tl.constexpr):
    rank = wl.rank(world)
    if rank > 0:
        send(world, x + (rank - 1) * n, 0)
        wl.notify(world, ready + rank - 1, to=0)
    else:
        first = n // 2
        wl.wait(ready + first // n, at_least=1, world=world)
        take(x + first, out)  # BUG: rows n // 2 to n + n // 2 - 1 lie in chunks 0 and 1


def main(world):
    x = world.zeros((2 * N,), torch.float32)
    gather[(1,)](world.arg, x, world.signals(2), torch.empty(N), N)
