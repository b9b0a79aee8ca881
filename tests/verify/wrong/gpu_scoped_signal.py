"""A signal of the device's scope to another device: it changes the word and orders nothing there.

Met in  kernels ported from one GPU, where Triton's default scope "gpu" is right
Found   the load behind the wait: both scopes must cover the two ranks
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

FOUND = "race"
SAYS = "does not reach from rank to rank"


@triton.jit
def exchange(world, x, ready, out):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, to=1, scope=wl.Scope.DEVICE)
    else:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)  # BUG: the signal's scope ends at its GPU


def main(world):
    launch_once(world, exchange)
