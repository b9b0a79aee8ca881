"""A cycle: each rank waits for the other's signal before it gives its own.

Met in  exchanges written as "receive, then send" on every rank
Found   the wait, and whose signal would come behind which wait
"""

import triton
from pieces import launch_once, send, take

import weft.language as wl

FOUND = "deadlock"
SAYS = "could be signalled by"


@triton.jit
def receive_then_send(world, x, ready, out):
    peer = 1 - wl.rank(world)
    wl.wait(ready, at_least=1, world=world)  # BUG: on both ranks first
    take(x, out)
    send(world, x, peer)
    wl.notify(world, ready, to=peer)


def main(world):
    launch_once(world, receive_then_send)
