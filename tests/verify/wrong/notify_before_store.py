"""Notify before the store: the signal announces what has not been written yet.

Met in  software-pipelined epilogues, where the signal of a tile moves above its store
Found   the store that comes after the release
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

FOUND = "race"


@triton.jit
def exchange(world, x, ready, out):
    if wl.rank(world) == 0:
        wl.notify(world, ready, to=1)
        send(world, x, 1)  # BUG: announced already
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)


def main(world):
    launch_once(world, exchange)
