"""Any rank may raise a stop flag, several may at once; everybody sees it sooner or later.

Suspicious  one word, SET by several ranks, all to the same value
Right       it is relaxed, and announces nothing but itself
"""

import triton

import weft.language as wl

RANKS = 3


@triton.jit
def work(world, stop):
    for peer in range(wl.num_ranks(world)):
        wl.notify(world, stop, 1, to=peer, op=wl.SignalOp.SET, order=wl.Order.RELAXED)
    while not wl.test(stop, at_least=1, order=wl.Order.RELAXED):
        pass


def main(world):
    work[(1,)](world.arg, world.signals(1))
