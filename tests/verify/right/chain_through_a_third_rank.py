"""A release chain: rank 0 writes to rank 2, and tells rank 1, which tells rank 2.

Suspicious  the rank that reads has no signal from the rank that wrote
Right       what rank 1 had seen is included in its release
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

RANKS = 3


@triton.jit
def relay(world, x, ready, out):
    rank = wl.rank(world)
    if rank == 0:
        send(world, x, 2)
    else:
        wl.wait(ready, at_least=1, world=world)
    if rank < 2:
        wl.notify(world, ready, to=rank + 1)
    else:
        take(x, out)


def main(world):
    launch_once(world, relay)
