"""A word of 64 bits is released; then another one of its array is read half by half, then it is
acquired.

Suspicious  one array accessed by elements of two sizes
Right       they are other words: what the first one's release has published stays
"""

import torch
import triton
import triton.language as tl
from pieces import N, row, send, take

import weft.language as wl


@triton.jit
def exchange(world, x, words, announced, halves):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, words + 1, to=1)
        wl.notify(world, announced, to=1, order=wl.Order.RELAXED)
    else:
        # weft: allow spin-without-acquire: the second wait acquires; this one is only for the order
        wl.wait(announced, at_least=1, world=world, order=wl.Order.RELAXED)
        half = words.to(tl.pointer_type(tl.int32))
        tl.store(halves, tl.load(half + tl.arange(0, 2)).sum())
        wl.wait(words + 1, at_least=1, world=world)
        take(x, x)


def main(world):
    words, halves = world.signals(2, torch.int64), torch.zeros(N, dtype=torch.int32)
    exchange[(1,)](world.arg, row(world), words, world.signals(1), halves)
