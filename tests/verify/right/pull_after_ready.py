"""Pull: the reader loads from the peer, once the peer has said that its rows are there.

Suspicious  the data is never sent
Right       the owner's release, the reader's acquire; a credit before the owner writes again
"""

import torch
import triton
from pieces import N, fill, lanes, row

import weft.language as wl


@triton.jit
def exchange(world, x, ready, read, out, turns):
    peer = 1 - wl.rank(world)
    for turn in range(turns):
        wl.wait(read, at_least=turn, world=world)
        fill(x)
        wl.notify(world, ready, to=peer)
        wl.wait(ready, at_least=turn + 1, world=world)
        wl.get(world, out + lanes(), x + lanes(), source=peer)
        wl.notify(world, read, to=peer)


def main(world):
    exchange[(1,)](world.arg, row(world), world.signals(1), world.signals(1), torch.empty(N), 3)
