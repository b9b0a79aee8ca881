"""A queue of three places with credits: the last credits are given and never used.

Suspicious  signals that nobody waits for at the end, and a counter larger than any wait asks for
Right       they are what the next use would wait for
"""

import torch
from pieces import N, stream_rows


def main(world):
    x, out = world.zeros((3, N), torch.float32), torch.empty(N)
    stream_rows[(1,)](world.arg, x, world.signals(1), world.signals(1), out, 7, N)
