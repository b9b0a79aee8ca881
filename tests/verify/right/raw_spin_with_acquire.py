"""A wait written by hand around Triton's own atomics.

Suspicious  no wl.wait anywhere
Right       the atomic that ends the loop acquires, system-wide; the exchange releases
"""

import triton
import triton.language as tl
from pieces import launch_once, send, take

import weft.language as wl


@triton.jit
def exchange(world, x, ready, out):
    if wl.rank(world) == 0:
        send(world, x, 1)
        tl.debug_barrier()
        tl.atomic_xchg(wl.at(world, ready, 1), 1, sem="release", scope="sys")
    else:
        while tl.atomic_add(ready, 0, sem="acquire", scope="sys") < 1:
            pass
        tl.debug_barrier()
        take(x, out)


def main(world):
    launch_once(world, exchange)
