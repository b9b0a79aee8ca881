"""Missing notify: the data is written, and nobody is told.

Met in  hand-written gathers, where one branch of the producer forgets its signal
Found   the consumer's wait: everybody who could have signalled has ended
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

FOUND = "unsatisfiable wait"
SAYS = "nobody who runs, waits or is queued"


@triton.jit
def exchange(world, x, ready, out):
    if wl.rank(world) == 0:
        send(world, x, 1)
    else:
        wl.wait(ready, at_least=1, world=world)  # BUG: nobody signals
        take(x, out)


def main(world):
    launch_once(world, exchange)
