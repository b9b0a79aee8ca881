"""A signal that nobody ever waits for: either it is not needed, or a wait was forgotten.

Met in  producers whose consumer was changed to wait for something else
Found   the signal, at the end of the run
"""

import triton
from pieces import row, send, take

import weft.language as wl

FOUND = "unused signal"


@triton.jit
def exchange(world, x, ready, read):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, to=1)
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, x)
        wl.notify(world, read, to=0)  # BUG: nobody looks at this word


def main(world):
    exchange[(1,)](world.arg, row(world), world.signals(1), world.signals(1))
