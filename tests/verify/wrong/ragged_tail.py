"""A ragged tail: the last tile is written whole, also where the row has ended.

Met in  kernels that were tested with sizes that the tile divides
Found   the store beyond the tensor's end
"""

import torch
import triton
import triton.language as tl
from pieces import N, lanes

import weft.language as wl

FOUND = "out of bounds"


@triton.jit
def push_tiles(world, x, n: tl.constexpr):
    at = tl.program_id(0) * n + lanes()
    values = lanes().to(tl.float32)
    wl.put(world, x + at, values, to=1 - wl.rank(world))  # BUG: no mask at < 40


def main(world):
    x = world.zeros((40,), torch.float32)
    push_tiles[(3,)](world.arg, x, N)
