"""A workspace that is used eager, recorded, replayed and eager again.

Suspicious  the recorded launches have frozen arguments
Right       no argument is an epoch: it is read from the slot
"""

import torch
import triton
from pieces import N, send, take

import weft.language as wl


@triton.jit
def exchange(world, slot, rows, ready, out):
    e, peer = wl.slot_epoch(slot), 1 - wl.rank(world)
    wl.slot_wait_free(world, slot, e)
    send(world, rows, peer)
    wl.notify(world, ready, e, to=peer, op=wl.SignalOp.SET)
    wl.wait(ready, at_least=e, world=world)
    take(rows, out)
    wl.slot_finish(world, slot, e, 1)


def call(world, out):
    shapes = {"rows": ((N,), torch.float32)}
    slot = world.workspace("exchange", shapes, {"ready": (1, torch.int64)})
    exchange[(1,)](world.arg, slot.arg, slot.rows, slot.ready, out)


def main(world):
    out = torch.empty(N)
    call(world, out)
    with world.record() as recording:
        call(world, out)
        call(world, out)
    for _ in range(3):
        recording.replay()
    call(world, out)
