"""Single words written by ordered stores, each announced by one more on a counter.

Suspicious  signals with no ordinary store between them
Right       the words are what is announced
"""

import torch
import triton
import triton.language as tl

import weft.language as wl


@triton.jit
def exchange(world, words, ready, out, num):
    if wl.rank(world) == 0:
        for i in range(num):
            wl.store(wl.at(world, words + i, 1), i * i)
            wl.notify(world, ready, to=1)
    else:
        wl.wait(ready, at_least=num - 2, world=world)
        tl.store(out, wl.load(words + num - 3))


def main(world):
    words, ready = world.zeros((5,), torch.int32), world.signals(1)
    exchange[(1,)](world.arg, words, ready, torch.zeros(1, dtype=torch.int32), 5)
