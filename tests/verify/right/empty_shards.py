"""Ranks without rows: they announce nothing, and nobody waits for them.

Suspicious  signals that never come, and one rank that signals and waits for nobody
Right       sender and receiver count tiles alike
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl

RANKS = 4


@triton.jit
def gather(world, x, ready, out, rows, n: tl.constexpr):
    rank = wl.rank(world)
    for peer in range(wl.num_ranks(world)):
        if rank < rows:
            send(world, x + rank * n, peer)
            wl.notify(world, ready + rank, to=peer)
    for source in range(rows):
        wl.wait(ready + source, at_least=1, world=world)
        take(x + source * n, out)


def main(world):
    x = world.zeros((world.num_ranks, N), torch.float32)
    for call in range(3):
        ready = world.signals(world.num_ranks)
        gather[(1,)](world.arg, x, ready, torch.empty(N), call, N)
        world.barrier()
