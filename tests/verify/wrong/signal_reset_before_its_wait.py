"""A signal that is reset before its wait has looked: the waiter comes late and finds 0.

Met in  consumers that clear their flags at the start of the kernel, "to be safe"
Found   the reset, behind which the wait finds nothing
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

FOUND = "lost signal"
SAYS = "it was 1 until it was set back at"


@triton.jit
def exchange(world, x, ready, out):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, to=1)
        wl.barrier(world)
    else:
        wl.barrier(world)
        wl.store(ready, 0)  # BUG: the signal is in this word already
        wl.wait(ready, at_least=1, world=world)
        take(x, out)


def main(world):
    launch_once(world, exchange)
