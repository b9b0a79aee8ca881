"""A consumer that looks now and then, and does something else meanwhile.

Suspicious  no wait; most looks say no
Right       the look that says yes acquires
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl


@triton.jit
def exchange(world, x, ready, out):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, to=1)
    else:
        looks = 0
        while not wl.test(ready, at_least=1):
            looks += 1
        take(x, out)


def main(world):
    launch_once(world, exchange)
