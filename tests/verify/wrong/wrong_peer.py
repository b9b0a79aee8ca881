"""Wrong peer: the data goes to the right neighbour, its signal to the left one.

Met in  rings; with two ranks the neighbours are the same and every test passes
Found   the load: the signal that came was somebody else's
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

FOUND = "race"
RANKS = 3


@triton.jit
def pass_on(world, x, ready, out):
    right = (wl.rank(world) + 1) % wl.num_ranks(world)
    left = (wl.rank(world) + wl.num_ranks(world) - 1) % wl.num_ranks(world)
    send(world, x, right)
    wl.notify(world, ready, to=left)
    wl.wait(ready, at_least=1, world=world)
    take(x, out)  # BUG: the signal was the right neighbour's, the data is the left one's


def main(world):
    launch_once(world, pass_on)
