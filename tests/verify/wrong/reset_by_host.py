"""A signal that the host resets between calls: the peer's next signal may be there already.

Met in  operators that begin with `flags.zero_()`
Found   the reset, unordered with the peer's signal
"""

import torch
import triton
from pieces import N, row, send, take

import weft.language as wl

FOUND = "race"


@triton.jit
def exchange(world, x, ready, out):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, to=1)
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)


def main(world):
    x, ready, out = row(world), world.signals(1), torch.empty(N)
    for _ in range(2):
        ready.zero_()  # BUG: nothing keeps the peer from having signalled
        exchange[(1,)](world.arg, x, ready, out)
