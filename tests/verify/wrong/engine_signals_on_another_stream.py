"""A copy engine's signal on another stream than its data: nothing keeps it behind the data.

Met in  overlapped gathers with one stream for transfers and one for signals
Found   the load behind the wait
"""

import torch
import triton
from pieces import N, row, take

import weft.language as wl

FOUND = "race"


@triton.jit
def receive(world, x, ready, out):
    wl.wait(ready, at_least=1, world=world)
    take(x, out)  # BUG: the signal may come before the copy


def main(world):
    x, ready, one = row(world), world.signals(1, torch.int64), world.signals(1, torch.int64)
    one.fill_(1)
    if world.rank == 0:
        copies = world.stream("copies")
        copies.wait(world.current_stream())
        with copies:
            world.copy(world.peer(x, 1), torch.ones(N))
        world.copy_word(world.peer(ready, 1), one)
        world.current_stream().wait(copies)
    else:
        receive[(1,)](world.arg, x, ready, torch.empty(N))
