"""A flag that is set once; every later call waits for it again.

Suspicious  waits that are satisfied by what an earlier call has left behind
Right       the data that it announces is never written again
"""

import torch
import triton
from pieces import N, row, send, take

import weft.language as wl


@triton.jit
def send_constant(world, x, ready):
    send(world, x, 1)
    wl.notify(world, ready, 1, to=1, op=wl.SignalOp.SET)


@triton.jit
def use(world, x, ready, out):
    wl.wait(ready, at_least=1, world=world)
    take(x, out)


def main(world):
    x, ready = row(world), world.signals(1)
    if world.rank == 0:
        send_constant[(1,)](world.arg, x, ready)
    for _ in range(3 * world.rank):
        use[(1,)](world.arg, x, ready, torch.empty(N))
