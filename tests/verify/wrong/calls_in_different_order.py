"""Ranks that call the same things in different order: each waits in another call.

Met in  pipelines whose ranks decide on their own what comes next
Found   the wait that the peer's other call never satisfies
"""

import triton

import weft.language as wl

FOUND = "deadlock"


@triton.jit
def exchange(world, ready):
    peer = 1 - wl.rank(world)
    wl.notify(world, ready, to=peer)
    wl.wait(ready, at_least=1, world=world)  # BUG: rank 0 waits in one call, rank 1 in the other


def main(world):
    calls = [world.signals(1, name="first"), world.signals(1, name="second")]
    for ready in calls if world.rank else reversed(calls):
        exchange[(1,)](world.arg, ready)
