"""A value that a graph freezes: each replay sends the number of the call that was recorded.

Met in  `cuStreamWriteValue` with an epoch of the host, captured in a CUDA graph
Found   the second replay's wait, for an epoch that is never sent
"""

import torch
import triton
import triton.language as tl

import weft.language as wl

FOUND = "unsatisfiable wait"


@triton.jit
def receive(world, epoch, ready):
    e = tl.load(epoch) + 1
    wl.wait(ready, at_least=e, world=world)  # BUG: every replay sends 1
    tl.store(epoch, e)


def main(world):
    epoch, sent = torch.zeros(1, dtype=torch.int64), world.signals(1, torch.int64)
    ready = world.signals(1, torch.int64)
    sent.fill_(1)
    with world.record() as recording:
        if world.rank == 0:
            world.copy_word(world.peer(ready, 1), sent)
        else:
            receive[(1,)](world.arg, epoch, ready)
    for _ in range(2):
        recording.replay()
