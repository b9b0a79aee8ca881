"""Packets one way, credits the other: between two credits there is nothing but packets.

Suspicious  a counter that the same line adds to again and again, and that ends too large
Right       each credit is for a row of packets that was read
"""

import torch
import triton
import triton.language as tl
from pieces import N, lanes

import weft.language as wl


@triton.jit
def stream_rows(world, packets, credit, out, rows, n: tl.constexpr):
    total = tl.zeros([n], tl.int32)
    if wl.rank(world) == 0:
        for i in range(rows):
            wl.wait(credit, at_least=i - 1, world=world)
            wl.put_packets(world, packets + i % 2 * n + lanes(), lanes(), i + 1, to=1)
    else:
        for i in range(rows):
            total += wl.wait_packets(packets + i % 2 * n + lanes(), i + 1, world=world)
            wl.notify(world, credit, to=0)
        tl.store(out + lanes(), total)


def main(world):
    packets = world.zeros((2, N), torch.int64)
    out = torch.empty(N, dtype=torch.int32)
    stream_rows[(1,)](world.arg, packets, world.signals(1), out, 6, N)
