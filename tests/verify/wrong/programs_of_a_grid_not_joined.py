"""One program signals for a whole grid, before the others have stored.

Met in  `if tl.program_id(0) == 0: notify(...)` at the end of a kernel
Found   the load of another program's rows
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl

FOUND = "race"


@triton.jit
def push_rows(world, x, ready, n: tl.constexpr):
    send(world, x + tl.program_id(0) * n, 1)
    if tl.program_id(0) == 0:
        wl.notify(world, ready, to=1)


@triton.jit
def receive(world, x, ready, out, n: tl.constexpr):
    wl.wait(ready, at_least=1, world=world)
    for i in range(3):
        take(x + i * n, out)  # BUG: program 0 spoke for all three


def main(world):
    x, ready = world.zeros((3, N), torch.float32), world.signals(1)
    if world.rank == 0:
        push_rows[(3,)](world.arg, x, ready, N)
    else:
        receive[(1,)](world.arg, x, ready, torch.empty(N), N)
