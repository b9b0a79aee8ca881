"""A credit sent behind one kernel's event, taken for one that speaks of the next kernel too.

Met in  credits on a stream of their own, whose event was recorded one launch too early
Found   the packets that come where others may still be read
"""

import torch
import triton
import triton.language as tl
from pieces import N, lanes

import weft.language as wl

FOUND = "race"


@triton.jit
def fill(world, packets, credits, n: tl.constexpr):
    """Rank 0: both buffers, and the second one again when it may be."""
    if wl.rank(world) == 0:
        wl.put_packets(world, packets + lanes(), lanes(), 1, to=1)
        wl.put_packets(world, packets + n + lanes(), lanes(), 1, to=1)
        wl.wait_packets(credits + lanes(), 1, world=world)
        wl.put_packets(world, packets + n + lanes(), lanes(), 2, to=1)  # BUG: read there still


@triton.jit
def read(world, packets, out, been_read):
    tl.store(out + lanes(), wl.wait_packets(packets + lanes(), 1, world=world))
    wl.notify(world, been_read, to=1, order=wl.Order.RELAXED)


@triton.jit
def give(world, credits, been_read):
    """Late enough, by the clock; but behind the first reading alone."""
    wl.wait(been_read, at_least=2, world=world, order=wl.Order.RELAXED)
    wl.put_packets(world, credits + lanes(), lanes(), 1, to=0)


def main(world):
    packets, credits = world.zeros((2, N), torch.int64), world.zeros((N,), torch.int64)
    been_read, out = world.signals(1), torch.empty(N, dtype=torch.int32)
    fill[(1,)](world.arg, packets, credits, N)
    if world.rank == 1:
        reading, giving = world.stream("reading"), world.stream("giving")
        reading.wait(world.current_stream())
        with reading:
            read[(1,)](world.arg, packets[0], out, been_read)
        giving.wait(reading)
        with reading:
            read[(1,)](world.arg, packets[1], out, been_read)
        with giving:
            give[(1,)](world.arg, credits, been_read)
