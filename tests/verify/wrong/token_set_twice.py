"""A token that is set again while the one before may still be there: the stream takes one for two.

Met in  the next call's kernel, which nothing orders behind the last call's copies
Found   the second launch's notify, where the word is 1 or nobody knows that it is not
"""

import torch
import triton
from pieces import N, fill, row

import weft.language as wl

FOUND = "lost signal"
SAYS = "is a token"


@triton.jit
def produce(world, rows, token):
    fill(rows)
    wl.notify(world, token, 1, to=wl.rank(world), op=wl.SignalOp.SET)  # BUG: for the second time


def main(world):
    inbox, token = row(world), world.signals(1, torch.int64)
    copies = world.stream("copies")
    for _ in range(2):  # each with rows of its own: nothing but the token is wrong
        rows = torch.empty(N)
        copies.wait(world.current_stream())
        produce[(1,)](world.arg, rows, token)
        with copies:
            world.take_token(token)
            world.copy(world.peer(inbox, 1 - world.rank), rows)
    world.current_stream().wait(copies)
    world.barrier()
