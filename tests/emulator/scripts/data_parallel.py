"""An SPMD script that knows nothing of weft: torch.distributed around a plain Triton kernel."""

import os
import sys

import torch
import torch.distributed as dist
import triton
import triton.language as tl


@triton.jit
def softmax_rows(out, x, columns, block: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, block)
    values = tl.load(x + row * columns + i, mask=i < columns, other=-float("inf"))
    values = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * columns + i, values / tl.sum(values, axis=0), mask=i < columns)


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert int(os.environ["RANK"]) == rank and int(os.environ["WORLD_SIZE"]) == ranks
    torch.manual_seed(rank)
    x = torch.randn(5, 37)
    out = torch.empty_like(x)
    softmax_rows[(x.shape[0],)](out, x, x.shape[1], triton.next_power_of_2(x.shape[1]))
    torch.testing.assert_close(out, torch.softmax(x, dim=1))
    gathered = [torch.empty_like(out) for _ in range(ranks)]
    dist.all_gather(gathered, out)
    total = out.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, torch.stack(gathered).sum(0))
    dist.barrier()
    print(f"rank {rank} of {ranks}: {float(total.sum()):.3f}", *sys.argv[1:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
