"""Packets, two buffers in turn, and no signal at all.

Suspicious  data is overwritten without any credit
Right       a packet's sender has read its own packets of the turn before
"""

import torch
import triton
import triton.language as tl
from pieces import N, lanes

import weft.language as wl


@triton.jit
def exchange(world, packets, out, turns, n: tl.constexpr):
    peer = 1 - wl.rank(world)
    for turn in range(turns):
        buffer = packets + turn % 2 * n + lanes()
        wl.put_packets(world, buffer, lanes() + turn, turn + 1, to=peer)
        tl.store(out + lanes(), wl.wait_packets(buffer, turn + 1, world=world))


def main(world):
    packets = world.zeros((2, N), torch.int64)
    exchange[(1,)](world.arg, packets, torch.empty(N, dtype=torch.int32), 5, N)
