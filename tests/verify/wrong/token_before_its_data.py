"""A token that is set before the rows are stored: the copy engine carries what was there.

Met in  epilogues that announce a tile when its last product is issued, not when it is stored
Found   the store, unordered with the copy
"""

import torch
import triton
from pieces import N, fill, row

import weft.language as wl

FOUND = "race"


@triton.jit
def produce(world, rows, token):
    wl.notify(world, token, 1, to=wl.rank(world), op=wl.SignalOp.SET)
    fill(rows)  # BUG: the token is set already


def main(world):
    rows, inbox, token = torch.zeros(N), row(world), world.signals(1, torch.int64)
    copies = world.stream("copies")
    copies.wait(world.current_stream())
    produce[(1,)](world.arg, rows, token)
    with copies:
        world.take_token(token)
        world.copy(world.peer(inbox, 1 - world.rank), rows)
    world.current_stream().wait(copies)
    world.barrier()
