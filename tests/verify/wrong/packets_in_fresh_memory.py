"""Packets in memory that nobody has set to zero: what it held may look like a packet with the flag.

Met in  mailboxes made by world.empty, which are recycled memory
Found   the wait for the packets
"""

import torch
import triton
import triton.language as tl
from pieces import N, lanes

import weft.language as wl

FOUND = "uninitialised"


@triton.jit
def exchange(world, packets, out):
    peer = 1 - wl.rank(world)
    wl.put_packets(world, packets + lanes(), lanes(), 1, to=peer)
    tl.store(out + lanes(), wl.wait_packets(packets + lanes() + 1, 1, world=world))  # BUG: + 1


def main(world):
    packets = world.empty((N + 1,), torch.int64)
    exchange[(1,)](world.arg, packets, torch.empty(N, dtype=torch.int32))
