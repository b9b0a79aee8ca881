"""All ranks send to all, then wait for all, each in another order.

Suspicious  waits in orders that differ from rank to rank look like a cycle
Right       no signal comes behind a wait
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl

RANKS = 4


@triton.jit
def gather(world, x, ready, out, n: tl.constexpr):
    ranks, rank = wl.num_ranks(world), wl.rank(world)
    for step in range(1, ranks):
        peer = (rank + step) % ranks
        send(world, x + rank * n, peer)
        wl.notify(world, ready + rank, to=peer)
    for step in range(1, ranks):
        source = (rank + ranks - step) % ranks
        wl.wait(ready + source, at_least=1, world=world)
        take(x + source * n, out)


def main(world):
    x = world.zeros((world.num_ranks, N), torch.float32)
    gather[(1,)](world.arg, x, world.signals(world.num_ranks), torch.empty(N), N)
