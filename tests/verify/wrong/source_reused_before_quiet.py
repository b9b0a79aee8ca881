"""The source of a transfer that does not block is overwritten while it is under way.

Met in  ports of NVSHMEM code: a signal does not complete the sender's side
Found   the store to the source
"""

import torch
import triton
from pieces import N, fill, lanes, row

import weft.language as wl

FOUND = "race"


@triton.jit
def push_twice(world, x, source):
    peer = 1 - wl.rank(world)
    wl.put_nbi(world, x + lanes(), source + lanes(), to=peer)
    wl.fence(world)
    fill(source)  # BUG: the put may still read it
    wl.barrier(world)


def main(world):
    push_twice[(1,)](world.arg, row(world), world.zeros((N,), torch.float32, name="source"))
