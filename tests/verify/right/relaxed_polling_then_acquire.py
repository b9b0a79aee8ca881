"""A loop that polls without order, and one acquire behind it.

Suspicious  the loop that ends the waiting acquires nothing
Right       the load that follows reads the same word, or a later value of it, with acquire
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl


@triton.jit
def exchange(world, x, ready, out):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, to=1)
    else:
        while wl.load(ready) < 1:
            pass
        wl.load(ready, order=wl.Order.ACQUIRE)
        take(x, out)


def main(world):
    launch_once(world, exchange)
