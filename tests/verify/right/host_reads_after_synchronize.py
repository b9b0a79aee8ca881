"""The host reads what a peer has written, without any look at a signal.

Suspicious  host code reads symmetric memory
Right       it has waited for a barrier of all ranks, which comes behind the peer's kernel
"""

import triton
from pieces import N, row, send

import weft.language as wl


@triton.jit
def push(world, x):
    send(world, x, 1 - wl.rank(world))


def main(world):
    x = row(world)
    push[(1,)](world.arg, x)
    world.barrier()
    world.synchronize()
    assert x.tolist() == list(range(N))
