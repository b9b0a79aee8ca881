"""A far pointer is dereferenced: a peer on another node has no address here.

Met in  kernels written for one node, run on two
Found   the access, which weft.language's put and get would have carried
"""

import torch
import triton
import triton.language as tl
from pieces import N, lanes, row

import weft.language as wl

FOUND = "far pointer"
NODES = (1, 1)


@triton.jit
def read_peer(world, x, out):
    theirs = wl.at(world, x + lanes(), 1 - wl.rank(world))  # BUG: the peer is on the other node
    tl.store(out + lanes(), tl.load(theirs))


def main(world):
    x = row(world)
    world.barrier()
    read_peer[(1,)](world.arg, x, torch.empty(N))
    world.barrier()
