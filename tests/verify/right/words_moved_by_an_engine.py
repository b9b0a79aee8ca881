"""A copy engine moves a word now and then; kernels load it, and nobody ever waits for it.

Suspicious  a word that is signalled, and no wait for it anywhere
Right       it is data: barriers order it; what came last is for nobody yet
"""

import torch
import triton
import triton.language as tl

import weft.language as wl


@triton.jit
def read(world, word, out):
    if wl.rank(world) == 1:
        tl.store(out, tl.load(word))


def main(world):
    word, mine = world.signals(1, torch.int64), world.signals(1, torch.int64)
    out = torch.zeros(1, dtype=torch.int64)
    for _ in range(3):
        read[(1,)](world.arg, word, out)
        world.barrier()
        if world.rank == 0:
            world.copy_word(world.peer(word, 1), mine)
        world.barrier()
