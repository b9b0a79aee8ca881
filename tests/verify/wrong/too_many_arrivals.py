"""A count that is one too large: the wait counts a producer that does not exist.

Met in  all-reduces that wait for num_ranks where only the peers signal
Found   the wait, with what it has seen
"""

import triton

import weft.language as wl

FOUND = "unsatisfiable wait"
RANKS = 3


@triton.jit
def arrive(world, ready):
    if wl.rank(world) > 0:
        wl.notify(world, ready, to=0)
    else:
        wl.wait(ready, at_least=wl.num_ranks(world), world=world)  # BUG: the peers are one less


def main(world):
    arrive[(1,)](world.arg, world.signals(1))
