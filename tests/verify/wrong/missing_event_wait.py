"""A missing wait between streams: the second kernel may start before the first has ended.

Met in  compute and communication on two streams
Found   the load on the side stream
"""

import torch
import triton
from pieces import N, fill, row, take

FOUND = "race"


@triton.jit
def produce(x):
    fill(x)


@triton.jit
def consume(x, out):
    take(x, out)  # BUG: the side stream waits for nothing


def main(world):
    x, side = row(world), world.stream("side")
    side.wait(world.current_stream())
    produce[(1,)](x)
    with side:
        consume[(1,)](x, torch.empty(N))
    world.current_stream().wait(side)
