"""A stream takes a token that no kernel sets: what is behind it never starts.

Met in  the last rows of a product, where fewer tiles are stored than tokens are taken
Found   the take: everybody who could have set it has ended
"""

import torch
import triton
from pieces import N, fill, row

import weft.language as wl

FOUND = "unsatisfiable wait"
SAYS = "tokens@rank0[1] = 1, a token, which is 0"


@triton.jit
def produce(world, rows, tokens):
    fill(rows)
    wl.notify(world, tokens, 1, to=wl.rank(world), op=wl.SignalOp.SET)


def main(world):
    rows, inbox, tokens = torch.empty(N), row(world), world.signals(2, torch.int64)
    copies = world.stream("copies")
    copies.wait(world.current_stream())
    produce[(1,)](world.arg, rows, tokens)
    if world.rank == 0:
        with copies:
            world.take_token(tokens[:1])
            world.copy(world.peer(inbox, 1), rows)
            world.take_token(tokens[1:])  # BUG: nobody sets the second word
    world.current_stream().wait(copies)
