"""A signal in recycled memory: the old word satisfies a wait before it is reset.

Met in  a widely used library: wrong results in ordinary use, when an allocator reuses a signal pad
Found   the wait, whose word nobody has written since it was allocated
"""

import torch
import triton
from pieces import fill, row

import weft.language as wl

FOUND = "stale signal"


@triton.jit
def wait_for_peer(world, ready):
    wl.wait(ready, at_least=1, world=world)  # BUG: the word may hold what was there before


@triton.jit
def prepare(x):
    fill(x)


@triton.jit
def announce(world, ready):
    wl.notify(world, ready, to=1 - wl.rank(world))


def main(world):
    old = world.empty((64,), torch.int32)
    old.fill_(7)
    world.free(old)
    ready = world.empty((64,), torch.int32)
    wait_for_peer[(1,)](world.arg, ready)
    x = row(world)
    with world.stream("side"):
        prepare[(1,)](x)
        ready.zero_()
        world.barrier()
        announce[(1,)](world.arg, ready)
