"""A chain of three ranks with one relaxed link: the last rank sees the signal and not the data.

Met in  relays between nodes that "only forward" a flag
Found   the load at the end of the chain
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

FOUND = "race"
RANKS = 3


@triton.jit
def relay(world, x, ready, out):
    if wl.rank(world) == 0:
        send(world, x, 2)
        wl.notify(world, ready, to=1)
    elif wl.rank(world) == 1:
        wl.wait(ready, at_least=1, world=world, order=wl.Order.RELAXED)
        wl.notify(world, ready, to=2)
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)  # BUG: rank 1 passed on a signal that it had not acquired


def main(world):
    launch_once(world, relay)
