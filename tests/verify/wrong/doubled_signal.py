"""A doubled signal: the counter runs ahead, and the next round's wait is satisfied too early.

Met in  producers that signal in their loop and once more behind it
Found   the second of two signals between which nothing was done
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

FOUND = "doubled signal"


@triton.jit
def exchange(world, x, ready, out):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, to=1)
        wl.notify(world, ready, to=1)  # BUG: announces nothing new
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)


def main(world):
    launch_once(world, exchange)
