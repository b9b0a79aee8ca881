"""A lost signal: two ranks SET one word, and whoever waits sees the data of the last one only.

Met in  gathers whose flag is one per destination where it must be one per source
Found   the SET that takes the place of another
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl

FOUND = "lost signal"
RANKS = 3


@triton.jit
def gather(world, x, ready, out, n: tl.constexpr):
    if wl.rank(world) > 0:
        send(world, x + wl.rank(world) * n, 0)
        wl.notify(world, ready, wl.rank(world), to=0, op=wl.SignalOp.SET)  # BUG: one word for two
    else:
        wl.wait(ready, at_least=wl.num_ranks(world) - 1, world=world)
        take(x, out)


def main(world):
    x = world.zeros((world.num_ranks, N), torch.float32)
    gather[(1,)](world.arg, x, world.signals(1), torch.empty(N), N)
