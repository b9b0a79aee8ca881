"""A barrier in a branch that not every rank takes.

Met in  kernels that return early where a rank has no rows
Found   the barrier that the others wait in
"""

import triton

import weft.language as wl

FOUND = "unsatisfiable wait"
RANKS = 3


@triton.jit
def work(world, rows):
    if wl.rank(world) < rows:
        wl.barrier(world)  # BUG: ranks without rows do not come


def main(world):
    work[(1,)](world.arg, 2)
