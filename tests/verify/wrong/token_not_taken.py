"""A copy engine that does not take the token: it reads rows while a kernel stores them.

Met in  overlapped products whose copies run on a stream of their own
Found   the copy, unordered with the store
"""

import torch
import triton
from pieces import N, fill, row

import weft.language as wl

FOUND = "race"


@triton.jit
def produce(world, rows, token):
    fill(rows)
    wl.notify(world, token, 1, to=wl.rank(world), op=wl.SignalOp.SET)


def main(world):
    rows, inbox, token = torch.empty(N), row(world), world.signals(1, torch.int64)
    copies = world.stream("copies")
    copies.wait(world.current_stream())
    produce[(1,)](world.arg, rows, token)
    with copies:
        world.copy(world.peer(inbox, 1 - world.rank), rows)  # BUG: world.take_token(token) first
    world.current_stream().wait(copies)
    world.barrier()
