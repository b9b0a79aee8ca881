"""A ring: what came from the left goes on to the right, each step into a place of its own.

Suspicious  a rank forwards data that it does not own
Right       each hop waits, and each hop's release includes what it has seen
"""

import torch
import triton
import triton.language as tl
from pieces import N, lanes

import weft.language as wl

RANKS = 4


@triton.jit
def ring(world, x, ready, out, n: tl.constexpr):
    ranks, rank = wl.num_ranks(world), wl.rank(world)
    right = (rank + 1) % ranks
    travelling = lanes() + 100.0 * rank
    total = travelling
    for step in range(1, ranks):
        wl.put(world, x + step * n + lanes(), travelling, to=right)
        wl.notify(world, ready, to=right)
        wl.wait(ready, at_least=step, world=world)
        travelling = tl.load(x + step * n + lanes())
        total += travelling
    tl.store(out + lanes(), total)


def main(world):
    x = world.zeros((world.num_ranks, N), torch.float32)
    ring[(1,)](world.arg, x, world.signals(1), torch.empty(N), N)
