"""Two steps: a signal of the device's scope to a program of the same GPU, which tells the peer.

Suspicious  the store that the peer reads was announced with scope "gpu" only
Right       each pair of scopes covers its two parties, and releases are cumulative
"""

import torch
import triton
import triton.language as tl
from pieces import N, row, send, take

import weft.language as wl


@triton.jit
def two_steps(world, x, stored, ready, out):
    if wl.rank(world) == 0:
        if tl.program_id(0) == 0:
            send(world, x, 1)
            wl.notify(world, stored, to=0, scope=wl.Scope.DEVICE)
        else:
            wl.wait(stored, at_least=1, world=world, scope=wl.Scope.DEVICE)
            wl.notify(world, ready, to=1)
    elif tl.program_id(0) == 0:
        wl.wait(ready, at_least=1, world=world)
        take(x, out)


def main(world):
    two_steps[(2,)](world.arg, row(world), world.signals(1), world.signals(1), torch.empty(N))
