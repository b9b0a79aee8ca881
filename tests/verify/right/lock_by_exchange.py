"""A lock: programs of both ranks update one row in turn.

Suspicious  plain loads and stores of one row by many programs, and no signal to wait for
Right       taking the lock acquires, giving it back releases
"""

import triton
import triton.language as tl
from pieces import N, lanes, row

import weft.language as wl


@triton.jit
def update(world, x, lock):
    theirs, key = wl.at(world, x + lanes(), 0), wl.at(world, lock, 0)
    while wl.atomic_exchange(key, 1) != 0:
        pass
    tl.store(theirs, tl.load(theirs) + 1)
    wl.store(key, 0, order=wl.Order.RELEASE)


def main(world):
    x, lock = row(world), world.signals(1)
    update[(3,)](world.arg, x, lock)
    world.barrier()
    if world.rank == 0:
        assert x.tolist() == [6.0] * N
