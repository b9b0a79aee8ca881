"""A token of the device's scope: it stays on its GPU, but whoever takes it is no part of that.

Met in  tickets and tokens of one GPU that are given one scope, the smallest that seems to do
Found   the copy, unordered with the store
"""

import torch
import triton
from pieces import N, fill, row

import weft.language as wl

FOUND = "race"
SAYS = "does not reach a stream"


@triton.jit
def produce(world, rows, token):
    fill(rows)
    wl.notify(world, token, 1, to=wl.rank(world), op=wl.SignalOp.SET, scope=wl.Scope.DEVICE)


def main(world):
    rows, inbox, token = torch.zeros(N), row(world), world.signals(1, torch.int64)
    copies = world.stream("copies")
    copies.wait(world.current_stream())
    produce[(1,)](world.arg, rows, token)
    with copies:
        world.take_token(token)
        world.copy(world.peer(inbox, 1 - world.rank), rows)  # BUG: the token orders nothing
    world.current_stream().wait(copies)
    world.barrier()
