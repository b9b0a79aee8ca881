"""A barrier in two halves: arrive, do something else, wait.

Suspicious  work on own memory between the two halves, while peers are past the barrier
Right       what lies between them touches nothing that peers use
"""

import triton
from pieces import fill, launch_once, send, take

import weft.language as wl


@triton.jit
def halves(world, x, ready, out):
    peer = 1 - wl.rank(world)
    send(world, x, peer)
    wl.notify(world, ready, to=peer)
    fill(out)
    wl.wait(ready, at_least=1, world=world)
    take(x, out)


def main(world):
    launch_once(world, halves)
