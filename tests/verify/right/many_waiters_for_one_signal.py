"""Programs of several kernels wait for one signal, some long after it has come.

Suspicious  one signal, many waits
Right       a signal is not used up by waiting for it
"""

import torch
import triton
import triton.language as tl
from pieces import N, row, send, take

import weft.language as wl


@triton.jit
def send_once(world, x, ready):
    send(world, x, 1)
    wl.notify(world, ready, to=1)


@triton.jit
def receive(world, x, ready, out, n: tl.constexpr):
    wl.wait(ready, at_least=1, world=world)
    take(x, out + tl.program_id(0) * n)


def main(world):
    x, ready = row(world), world.signals(1)
    if world.rank == 0:
        send_once[(1,)](world.arg, x, ready)
    else:
        for _ in range(2):
            receive[(3,)](world.arg, x, ready, torch.empty(3, N), N)
