"""A flag that goes from 0 to 1 and back in every round.

Suspicious  the flag is reset, and set to 1 again, by different ranks
Right       barriers stand on both sides of the reset
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl


@triton.jit
def rounds(world, x, ready, out):
    rank = wl.rank(world)
    for _ in range(3):
        if rank == 0:
            send(world, x, 1)
            wl.notify(world, ready, 1, to=1, op=wl.SignalOp.SET)
        else:
            wl.wait(ready, at_least=1, world=world)
            take(x, out)
            wl.store(ready, 0)
        wl.barrier(world)


def main(world):
    launch_once(world, rounds)
