"""A transfer that does not block, at the end of a kernel: nobody ever asks whether it is over.

Met in  ports of NVSHMEM code, where the end of a kernel is taken for a quiet
Found   the transfer, when its program ends
"""

import torch
import triton
from pieces import N, lanes, row

import weft.language as wl

FOUND = "unfinished transfer"


@triton.jit
def push(world, x, source):
    peer = 1 - wl.rank(world)
    wl.put_nbi(world, x + lanes(), source + lanes(), to=peer)
    wl.fence(world)
    wl.put_nbi(world, x + lanes(), source + lanes(), to=peer)  # BUG: behind the last fence


def main(world):
    push[(1,)](world.arg, row(world), torch.ones(N))
