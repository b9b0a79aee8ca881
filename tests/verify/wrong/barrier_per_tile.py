"""A barrier for every tile: programs that run wait for those that cannot start.

Met in  fused all-reduces with one program per tile, once there are more tiles than the device holds
Found   the wait, and how many programs the device would have to hold
"""

import torch
import triton

import weft.language as wl

FOUND = "residency"
SAYS = "would have to hold 7 programs"
NUM_SMS = 4


@triton.jit
def barrier_of_all_tiles(arrived, tiles):
    wl.atomic_add(arrived, 1, scope=wl.Scope.DEVICE)
    wl.wait(arrived, at_least=tiles, scope=wl.Scope.DEVICE)  # BUG: tiles > resident programs


def main(world):
    arrived = torch.zeros(1, dtype=torch.int32)
    barrier_of_all_tiles[(7,)](arrived, 7)
