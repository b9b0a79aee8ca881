"""A relaxed wait: loads behind it may have been made before it.

Met in  polling loops that lost the acquire which must follow them
Found   the load behind the wait
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

FOUND = "race"
SAYS = "the wait for ready@rank1[0] at"


@triton.jit
def exchange(world, x, ready, out):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, to=1)
    else:
        wl.wait(ready, at_least=1, world=world, order=wl.Order.RELAXED)
        take(x, out)  # BUG: may be older than the signal


def main(world):
    launch_once(world, exchange)
