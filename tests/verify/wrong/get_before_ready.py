"""A get before the peer is ready: what is pulled may not have been written yet.

Met in  pull-style gathers, whose readers know when they are ready and not when the owner is
Found   the get
"""

import triton
from pieces import fill, lanes, launch_once

import weft.language as wl

FOUND = "race"


@triton.jit
def exchange(world, x, ready, out):
    fill(x)
    wl.notify(world, ready, to=1 - wl.rank(world))
    wl.get(world, out + lanes(), x + lanes(), source=1 - wl.rank(world))  # BUG: before the wait
    wl.wait(ready, at_least=1, world=world)


def main(world):
    launch_once(world, exchange)
