"""An epoch that does not advance: the second call sets the flag to what it is already.

Met in  operators that were tested with one call
Found   the signal of the second call: whoever waits cannot tell it from the first
"""

import triton
from pieces import launch_times, send, take

import weft.language as wl

FOUND = "epoch not advanced"


@triton.jit
def exchange(world, x, ready, out, call):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, 1, to=1, op=wl.SignalOp.SET)  # BUG: 1 in every call
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)


def main(world):
    launch_times(world, exchange, 2)
