"""A transfer that does not block, and a signal right behind it: the signal does not cover it.

Met in  ports of `put_signal` to a put without waiting and a flag, which lost the fence between them
Found   the load behind the wait
"""

import torch
import triton
from pieces import N, lanes, row, take

import weft.language as wl

FOUND = "race"
SAYS = "the write is asynchronous, and not complete where"


@triton.jit
def exchange(world, x, source, ready, out):
    if wl.rank(world) == 0:
        wl.put_nbi(world, x + lanes(), source + lanes(), to=1)
        wl.notify(world, ready, to=1)
        wl.quiet(world)
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)  # BUG: the put may be under way until the quiet


def main(world):
    exchange[(1,)](world.arg, row(world), torch.ones(N), world.signals(1), torch.empty(N))
