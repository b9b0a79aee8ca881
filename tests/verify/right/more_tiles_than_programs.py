"""Far more programs than the device holds, each waiting for a peer's tile.

Suspicious  programs that wait, and many that cannot start
Right       a program pushes its tile before it waits, so those that run never need those to come
"""

import torch
import triton
import triton.language as tl
from pieces import N, send, take

import weft.language as wl

NUM_SMS = 2


@triton.jit
def exchange(world, x, ready, out, n: tl.constexpr):
    tile, peer = tl.program_id(0), 1 - wl.rank(world)
    if wl.rank(world) == 0:
        send(world, x + tile * n, peer)
        wl.notify(world, ready + tile, to=peer)
    else:
        wl.wait(ready + tile, at_least=1, world=world)
        take(x + tile * n, out + tile * n)


def main(world):
    x = world.zeros((9, N), torch.float32)
    exchange[(9,)](world.arg, x, world.signals(9), torch.empty(9, N), N)
