"""A packet over one of the same flag: the old packet passes for the new one.

Met in  low-latency protocols whose flag is a constant
Found   the put whose flag the word holds already
"""

import torch
import triton
import triton.language as tl
from pieces import N, lanes

import weft.language as wl

FOUND = "stale flag"


@triton.jit
def exchange(world, packets, out):
    peer = 1 - wl.rank(world)
    wl.put_packets(world, packets + lanes(), lanes(), 1, to=peer)  # BUG: flag 1 in every call
    tl.store(out + lanes(), wl.wait_packets(packets + lanes(), 1, world=world))


def main(world):
    packets, out = world.zeros((N,), torch.int64), torch.empty(N, dtype=torch.int32)
    for _ in range(2):
        exchange[(1,)](world.arg, packets, out)
        world.barrier()
