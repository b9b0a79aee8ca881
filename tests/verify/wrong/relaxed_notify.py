"""A relaxed signal: it may overtake the data that it announces.

Met in  ports of code that had a fence before its signal
Found   the load behind the wait
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

FOUND = "race"
SAYS = "the signal to ready@rank1[0] at"


@triton.jit
def exchange(world, x, ready, out):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, to=1, order=wl.Order.RELAXED)
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)  # BUG: the signal may come before the data


def main(world):
    launch_once(world, exchange)
