"""A word that a peer adds to, read by a plain load just before: nothing orders the two.

Met in  progress that is looked at "only once", and counters that are read for a log
Found   the load, though it comes first: an atomic access does not order what is no atomic access
"""

import torch
import triton
import triton.language as tl

import weft.language as wl

FOUND = "race"


@triton.jit
def look(world, progress, seen, out):
    if wl.rank(world) == 0:
        tl.store(out, tl.load(progress))  # BUG: wl.load(progress) is right
        wl.notify(world, seen, to=1, order=wl.Order.RELAXED)
    else:
        wl.wait(seen, at_least=1, world=world)
        wl.notify(world, progress, to=0)


def main(world):
    progress, seen = world.signals(1, name="progress"), world.signals(1, name="seen")
    look[(1,)](world.arg, progress, seen, torch.zeros(1, dtype=torch.int32))
