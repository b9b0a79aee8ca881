"""An epoch that goes back: a word that counted to 3 is set to 2.

Met in  operators whose two code paths keep epochs of their own for one flag
Found   the signal that sets the word back
"""

import triton

import weft.language as wl

FOUND = "epoch not advanced"


@triton.jit
def announce(world, ready, epoch):
    if wl.rank(world) == 0:
        wl.notify(world, ready, epoch, to=1, op=wl.SignalOp.SET)  # BUG: 3, then 2
    else:
        wl.wait(ready, at_least=epoch, world=world)


def main(world):
    ready = world.signals(1)
    for epoch in (3, 2):
        announce[(1,)](world.arg, ready, epoch)
