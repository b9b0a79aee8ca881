"""Credits in a run so short that no writer ever waits for one.

Suspicious  signals, and not one wait for them in the whole run
Right       the wait is there, for the rows that come after the queue is full
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl


@triton.jit
def stream_rows(world, x, ready, credit, out, rows, n: tl.constexpr):
    if wl.rank(world) == 0:
        for i in range(rows):
            if i >= 3:
                wl.wait(credit, at_least=i - 2, world=world)
            send(world, x + i % 3 * n, 1)
            wl.notify(world, ready, to=1)
    else:
        for i in range(rows):
            wl.wait(ready, at_least=i + 1, world=world)
            take(x + i % 3 * n, out)
            wl.notify(world, credit, to=0)


def main(world):
    x = world.zeros((3, N), torch.float32)
    stream_rows[(1,)](world.arg, x, world.signals(1), world.signals(1), torch.empty(N), 2, N)
