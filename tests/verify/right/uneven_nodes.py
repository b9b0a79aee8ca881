"""Three ranks on one node, one on another; every rank sends to every other by put_signal.

Suspicious  far ranks are reached, in nodes of different sizes
Right       put_signal reaches far ranks, and carries its data before its signal
"""

import torch
import triton
import triton.language as tl
from pieces import N, lanes, take

import weft.language as wl

NODES = (3, 1)


@triton.jit
def gather(world, x, ready, out, n: tl.constexpr):
    ranks, rank = wl.num_ranks(world), wl.rank(world)
    for peer in range(ranks):
        mine = rank * n + lanes()
        wl.put_signal(world, x + mine, lanes().to(tl.float32), ready + rank, to=peer)
    for source in range(ranks):
        wl.wait(ready + source, at_least=1, world=world)
        take(x + source * n, out)


def main(world):
    x = world.zeros((world.num_ranks, N), torch.float32)
    gather[(1,)](world.arg, x, world.signals(world.num_ranks), torch.empty(N), N)
