"""torch's own pipelined all-gather over its workspace, with a consumer of each shard.

The fault: the consumer takes the shard that is still on its way.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from launch import FAULT, start


@triton.jit
def square(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)  # FAULT
    tl.store(out + at, value * value)


def main():
    rank, ranks, device = start()
    shard = torch.arange(32, dtype=torch.float32, device=device) + 100 * rank
    gathered, out = (torch.zeros(ranks * 32, device=device) for _ in range(2))
    parts = gathered.view(ranks, 32)

    def consume(part, source):
        part = parts[(source + 1) % ranks] if FAULT else part
        square[(1,)](part, out.view(ranks, 32)[source], 32)

    symm_mem.get_symm_mem_workspace(dist.group.WORLD.group_name, min_size=shard.nbytes)
    symm_mem._pipelined_all_gather_and_consume(
        shard, consume, gathered, dist.group.WORLD.group_name
    )
    expected = torch.cat([torch.arange(32.0) + 100 * peer for peer in range(ranks)]) ** 2
    torch.testing.assert_close(out.cpu(), expected)


if __name__ == "__main__":
    main()
