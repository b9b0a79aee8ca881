"""A grid that fills the device exactly, with barriers among all its programs.

Suspicious  programs that wait for each other, and not one place to spare
Right       the launch is cooperative, and all of them fit
"""

import torch
import triton
import triton.language as tl
from pieces import N, fill, take

import weft.language as wl

NUM_SMS = 4


@triton.jit
def shift(x, counter, out, n: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    for _ in range(2):
        fill(x + program * n)
        wl.barrier_grid(counter)
        take(x + (program + 1) % programs * n, out + program * n)
        wl.barrier_grid(counter)


def main(world):
    counter = torch.zeros(1, dtype=torch.int32)
    x, out = torch.empty(4, N), torch.empty(4, N)
    shift[(4,)](x, counter, out, N, launch_cooperative_grid=True)
