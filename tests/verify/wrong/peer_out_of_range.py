"""A peer beyond the last rank: the neighbour of the last rank is the first.

Met in  rings and halo exchanges
Found   the put to a rank that does not exist
"""

import triton
from pieces import row, send

import weft.language as wl

FOUND = "peer"


@triton.jit
def push_right(world, x):
    right = wl.rank(world) + 1
    send(world, x, right)  # BUG: not modulo the number of ranks


def main(world):
    push_right[(1,)](world.arg, row(world))
