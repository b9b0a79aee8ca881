"""A rank that signals to itself, as to every peer, so that its own rows are no special case.

Suspicious  a remote signal to the own rank
Right       it is a signal like any other
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl

RANKS = 3


@triton.jit
def gather(world, x, ready, out, n: tl.constexpr):
    ranks, rank = wl.num_ranks(world), wl.rank(world)
    for peer in range(ranks):
        send(world, x + rank * n, peer)
        wl.notify(world, ready + rank, to=peer)
    for source in range(ranks):
        wl.wait(ready + source, at_least=1, world=world)
        take(x + source * n, out)


def main(world):
    x = world.zeros((world.num_ranks, N), torch.float32)
    gather[(1,)](world.arg, x, world.signals(world.num_ranks), torch.empty(N), N)
