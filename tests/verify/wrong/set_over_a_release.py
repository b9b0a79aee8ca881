"""A word that was released is set by somebody else, relaxed: who sees that has acquired nothing.

Met in  a "go" that a third rank overwrites with "stop", and data behind the "go"
Found   the load behind the wait: a store ends what earlier releases of the word hand on
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

FOUND = "race"
RANKS = 3


@triton.jit
def overwrite(world, x, ready, out):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, to=1)
        wl.notify(world, ready, to=2, order=wl.Order.RELAXED)
    elif wl.rank(world) == 2:
        wl.wait(ready, at_least=1, world=world)
        wl.notify(world, ready, 2, to=1, op=wl.SignalOp.SET, order=wl.Order.RELAXED)
    else:
        wl.wait(ready, at_least=2, world=world)
        take(x, out)  # BUG: the 2 is rank 2's, and comes without rank 0's row


def main(world):
    launch_once(world, overwrite)
