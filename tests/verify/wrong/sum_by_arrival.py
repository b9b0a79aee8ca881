"""A sum in order of arrival: every run rounds differently, where results are said to be equal.

Met in  reductions by `atomic_add` on floats
Found   the atomic: sums depend on who comes first
"""

import torch
import triton
import triton.language as tl
from pieces import N, lanes, row

import weft.language as wl

FOUND = "nondeterministic result"
RANKS = 3
DETERMINISTIC = True


@triton.jit
def reduce(world, total, values):
    parts = wl.at(world, total + lanes(), 0)
    tl.atomic_add(parts, tl.load(values + lanes()), sem="relaxed", scope="sys")  # BUG: in any order
    wl.barrier(world)


def main(world):
    total = row(world)
    reduce[(1,)](world.arg, total, torch.full((N,), [1e8, -1e8, 1.0][world.rank]))
    return total.clone()
