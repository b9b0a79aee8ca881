"""One store, and then a signal to every rank that will read it.

Suspicious  the second and third signal announce nothing new
Right       each goes to another rank
"""

import triton
from pieces import fill, lanes, launch_once

import weft.language as wl

RANKS = 4


@triton.jit
def publish(world, x, ready, out):
    ranks = wl.num_ranks(world)
    if wl.rank(world) == 0:
        fill(x)
        for peer in range(1, ranks):
            wl.notify(world, ready, to=peer)
    else:
        wl.wait(ready, at_least=1, world=world)
        wl.get(world, out + lanes(), x + lanes(), source=0)


def main(world):
    launch_once(world, publish)
