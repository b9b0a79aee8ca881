"""A wait by plain loads: the compiler may read the word once, and nothing behind it is ordered.

Met in  first versions of nearly every hand-written barrier
Found   the loop that reads one word again and again
"""

import triton
import triton.language as tl
from pieces import launch_once

import weft.language as wl

FOUND = "plain spin"


@triton.jit
def exchange(world, x, ready, out):
    if wl.rank(world) == 0:
        wl.wait(ready, at_least=1, world=world)
        wl.notify(world, ready, to=1)
    else:
        wl.notify(world, ready, to=0)
        looks = 0
        while tl.load(ready) < 1:  # BUG: plain loads
            looks += 1
        tl.store(out, looks)


def main(world):
    launch_once(world, exchange)
