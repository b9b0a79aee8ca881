"""What the scripts here begin with: the rank, its GPU, torch's process group."""

import os
import sys

import torch
import torch.distributed as dist

FAULT = "--fault" in sys.argv


def start():
    """(rank, number of ranks, device)."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return rank, world_size, device
