"""Symmetric memory that one rank alone frees: freeing is collective.

Met in  tensors that go out of scope on one rank earlier than on the others
Raises  AllocationOrderError: the ranks' collective steps differ
"""

import torch
from pieces import N, row

RAISES = "AllocationOrderError"


def main(world):
    x = row(world)
    if world.rank == 0:
        world.free(x)  # BUG: rank 1 keeps it
    world.zeros((N,), torch.float32)
