"""One single call on a workspace: its credits are for a call that never comes.

Suspicious  slot_free is signalled to every rank, and nobody waits for that value
Right       the next call would
"""

import torch
import triton
from pieces import N, send, take

import weft.language as wl


@triton.jit
def exchange(world, slot, rows, ready, out):
    e, rank = wl.slot_epoch(slot), wl.rank(world)
    if rank == 0:
        wl.slot_wait_free(world, slot, e)
        send(world, rows, 1)
        wl.notify(world, ready, e, to=1, op=wl.SignalOp.SET)
    else:
        wl.wait(ready, at_least=e, world=world)
        take(rows, out)
    wl.slot_finish(world, slot, e, 1)


def main(world):
    shapes = {"rows": ((N,), torch.float32)}
    slot = world.workspace("exchange", shapes, {"ready": (1, torch.int64)})
    exchange[(1,)](world.arg, slot.arg, slot.rows, slot.ready, torch.empty(N))
