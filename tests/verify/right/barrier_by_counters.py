"""A barrier made by hand: everybody adds one to everybody's counter, which is never reset.

Suspicious  nothing but relaxed-looking counters between a store and a peer's load
Right       adding is a release, waiting an acquire, and the target grows by the rank count
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

RANKS = 3


@triton.jit
def barrier(world, arrived, turn):
    for peer in range(wl.num_ranks(world)):
        wl.notify(world, arrived, to=peer)
    wl.wait(arrived, at_least=turn * wl.num_ranks(world), world=world)


@triton.jit
def rotate(world, x, arrived, out):
    n = wl.num_ranks(world)
    for turn in range(3):
        send(world, x, (wl.rank(world) + turn) % n)
        barrier(world, arrived, 2 * turn + 1)
        take(x, out)
        barrier(world, arrived, 2 * turn + 2)


def main(world):
    launch_once(world, rotate)
