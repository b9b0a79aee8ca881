"""A spin on a relaxed atomic: the loop ends, and orders nothing.

Met in  kernels with `while tl.atomic_add(flag, 0, sem="relaxed") < 1`
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
        while tl.atomic_add(ready, 0, sem="relaxed", scope="sys") < 1:
            pass
        take(x, out)  # BUG: the loop acquires nothing


def main(world):
    launch_once(world, exchange)
