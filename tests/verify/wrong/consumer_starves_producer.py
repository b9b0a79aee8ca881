"""A full grid of consumers is launched first, and leaves no room for their producer.

Met in  overlap by streams: which kernel gets the SMs first is luck
Found   the consumers' wait, and how many programs the device would have to hold
"""

import triton

import weft.language as wl

FOUND = "residency"
SAYS = "would have to hold 5 programs"
NUM_SMS = 4


@triton.jit
def consume(world, ready):
    wl.wait(ready, at_least=1, world=world)  # BUG: the producer cannot start


@triton.jit
def produce(world, ready):
    wl.notify(world, ready, to=wl.rank(world))


def main(world):
    ready = world.signals(1)
    side = world.stream("side")
    with side:
        consume[(4,)](world.arg, ready)
    produce[(1,)](world.arg, ready)
    world.current_stream().wait(side)
