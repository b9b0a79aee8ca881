"""A wait by volatile loads: they look again each time, and order nothing.

Met in  ports of CUDA code that waits on `volatile int*`; on AMD such a loop may never end
Found   the load behind the loop
"""

import triton
import triton.language as tl
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
        while tl.load(ready, volatile=True) < 1:
            pass
        take(x, out)  # BUG: volatile orders nothing


def main(world):
    launch_once(world, exchange)
