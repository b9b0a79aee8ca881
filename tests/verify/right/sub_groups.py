"""Two worlds over sub-groups beside the world of all; all three use signal 0 of their own.

Suspicious  the same kernel, the same word number, ranks numbered from 0 in each group
Right       each world has its own heap and its own signals
"""

import torch.distributed as dist
import triton
from pieces import launch_once, send, take

import weft
import weft.language as wl

RANKS = 4


@triton.jit
def exchange(world, x, ready, out):
    peer = wl.num_ranks(world) - 1 - wl.rank(world)
    send(world, x, peer)
    wl.notify(world, ready, to=peer)
    wl.wait(ready, at_least=1, world=world)
    take(x, out)


def main(world):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = weft.init(groups[world.rank % 2], heap_bytes=1 << 20)
    for each in (mine, world, mine):
        launch_once(each, exchange)
    mine.synchronize()
    mine.close()
