"""Credits in a run so short that no writer ever waits for one.

Suspicious  signals, and not one wait for them in the whole run
Right       the wait is there, for the rows that come after the queue is full
"""

import torch
from pieces import N, stream_rows


def main(world):
    x, out = world.zeros((3, N), torch.float32), torch.empty(N)
    stream_rows[(1,)](world.arg, x, world.signals(1), world.signals(1), out, 2, N)
