"""Rank 0 loads from a far rank directly, on GPUs declared two nodes: it has no address there."""

import os
import sys

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import weft
import weft.language as wl


@triton.jit
def dereference(world, x, out, peer):
    tl.store(out, tl.load(wl.at(world, x, peer)))


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group()
    world = weft.init(heap_bytes=16 << 20, nodes=2)
    x, out = world.zeros(4, torch.float32), torch.zeros(1, device=world.device)
    for peer in range(world.num_ranks):
        near = world.backend.seats.nodes[peer] == world.node
        if world.rank == 0:
            try:
                dereference[(1,)](world.arg, x, out, peer)
                torch.cuda.synchronize()
                print(f"rank {peer} was read: {'near' if near else 'FAR'}", flush=True)
            except RuntimeError as error:
                print(f"rank {peer} faulted: {str(error).splitlines()[0]}", flush=True)
                break
    sys.stdout.flush()
    # A process whose GPU has faulted can only end; and the other need not wait for it.
    os._exit(0)


if __name__ == "__main__":
    main()
