"""An epoch counted by the host: a recorded launch keeps the number it was recorded with.

Met in  operators that pass `call_count` to their kernel, once they run in a CUDA graph
Found   the signal of the second replay
"""

import torch
import triton
from pieces import N, row, send, take

import weft.language as wl

FOUND = "epoch not advanced"


@triton.jit
def exchange(world, x, ready, out, epoch):
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, epoch, to=1, op=wl.SignalOp.SET)  # BUG: the same in every replay
    else:
        wl.wait(ready, at_least=epoch, world=world)
        take(x, out)


def main(world):
    x, ready, out = row(world), world.signals(1), torch.empty(N)
    with world.record() as recording:
        exchange[(1,)](world.arg, x, ready, out, 1)
    for _ in range(3):
        recording.replay()
