"""Integers added in order of arrival, where results are said to be equal in every run.

Suspicious  atomics of many ranks, unordered
Right       integers add up to the same in any order
"""

import torch
import triton
import triton.language as tl
from pieces import N, lanes

import weft.language as wl

RANKS = 3
DETERMINISTIC = True


@triton.jit
def reduce(world, total):
    tl.atomic_add(wl.at(world, total + lanes(), 0), lanes(), sem="relaxed", scope="sys")
    wl.barrier(world)


def main(world):
    total = world.zeros((N,), torch.int32)
    reduce[(1,)](world.arg, total)
    return total.clone()
