"""A token that a peer sets: the stream's wait for it has no bound, and no report.

Met in  copy engines that wait for a peer's "ready" by cuStreamWaitValue
Found   the take
"""

import torch
import triton

import weft.language as wl

FOUND = "unbounded wait"


@triton.jit
def tell(world, token):
    wl.notify(world, token, 1, to=1 - wl.rank(world), op=wl.SignalOp.SET)


def main(world):
    token = world.signals(1, torch.int64)
    tell[(1,)](world.arg, token)
    world.take_token(token)  # BUG: the other rank sets it
    world.barrier()
