"""A flag that is set to 1 in every round, and a barrier before anybody looks at it.

Suspicious  the flag is the same in every round
Right       the barrier orders the data; the flag says nothing new, and nobody relies on it
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl


@triton.jit
def rounds(world, x, ready, out):
    for _ in range(3):
        if wl.rank(world) == 0:
            send(world, x, 1)
            wl.notify(world, ready, 1, to=1, op=wl.SignalOp.SET)
        wl.barrier(world)
        if wl.rank(world) == 1:
            wl.wait(ready, at_least=1, world=world)
            take(x, out)
        wl.barrier(world)


def main(world):
    launch_once(world, rounds)
