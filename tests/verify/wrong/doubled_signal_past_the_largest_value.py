"""A doubled signal by which a counter passes its largest value, and is far below what is needed.

Met in  counters that are never reset, in programs that run for days
Found   as anywhere else: what is ahead of what is compared modulo the word
"""

import triton
from pieces import row, send, take

import weft.language as wl

FOUND = "doubled signal"
LARGEST = 2**31 - 1


@triton.jit
def exchange(world, x, ready, out, largest):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, to=1)
        wl.notify(world, ready, to=1)  # BUG: announces nothing new
    else:
        wl.wait(ready, at_least=largest, world=world)
        take(x, out)


def main(world):
    ready = world.signals(1)
    ready.fill_(LARGEST - 1)
    world.barrier()
    exchange[(1,)](world.arg, row(world), ready, row(world), LARGEST)
