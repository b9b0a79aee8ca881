"""Missing wait: the data is signalled, and the consumer reads before it waits.

Met in  overlapped GEMMs whose prologue prefetches the first tile
Found   the load that nothing orders behind the peer's store
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

FOUND = "race"


@triton.jit
def exchange(world, x, ready, out):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, to=1)
    else:
        take(x, out)  # BUG: before the wait
        wl.wait(ready, at_least=1, world=world)


def main(world):
    launch_once(world, exchange)
