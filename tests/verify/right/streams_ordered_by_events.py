"""A buffer that kernels of two streams use in turn.

Suspicious  no signal between them, on one rank
Right       each stream waits for an event of the other
"""

import torch
import triton
from pieces import N, fill, row, take


@triton.jit
def produce(x):
    fill(x)


@triton.jit
def consume(x, out):
    take(x, out)


def main(world):
    x, out, side = row(world), torch.empty(N), world.stream("side")
    main_stream = world.current_stream()
    for _ in range(3):
        produce[(1,)](x)
        side.wait(main_stream)
        with side:
            consume[(1,)](x, out)
        main_stream.wait(side)
