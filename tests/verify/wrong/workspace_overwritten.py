"""A workspace that a faster rank overwrites: its second call waits for no reader of the first.

Met in  a widely used all-reduce; seen when one rank is delayed
Found   the second call's store, and the first call's load that it may meet
"""

import triton
from pieces import launch_times, send, take

import weft.language as wl

FOUND = "race"
SAYS = "in its call 2 of exchange, overwrites"


@triton.jit
def exchange(world, x, ready, out, call):
    if wl.rank(world) == 0:
        send(world, x, 1)  # BUG: is rank 1 done with the call before?
        wl.notify(world, ready, call, to=1, op=wl.SignalOp.SET)
    else:
        wl.wait(ready, at_least=call, world=world)
        take(x, out)


def main(world):
    launch_times(world, exchange, 3)
