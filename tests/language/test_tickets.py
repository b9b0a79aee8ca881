"""Tickets: every task is drawn once, launch after launch."""

from __future__ import annotations

import language_kernels as kernels
import pytest
import torch
import triton
import triton.language as tl
from language_kernels import GPUS

import weft
import weft.language as wl
from weft.verify import compiled


@triton.jit
def draw(flags, counter, n):
    """flags[t] counts how often task t was drawn."""
    t = wl.next_task(counter, n, tl.num_programs(0))
    while t < n:
        tl.atomic_add(flags + t, 1)
        t = wl.next_task(counter, n, tl.num_programs(0))


@pytest.mark.parametrize("num_tasks", [0, 1, 7])
def test_every_task_is_drawn_once_launch_after_launch(ranks, num_tasks):
    def main():
        world = weft.init()
        counter = torch.zeros(1, dtype=torch.int32)
        drawn = torch.zeros(8, dtype=torch.int32)
        for _ in range(3):
            draw[(3,)](drawn, counter, num_tasks)
        world.synchronize()
        assert counter.item() == 0
        return drawn.tolist()

    assert ranks(main, 1) == [[3] * num_tasks + [0] * (8 - num_tasks)]


@pytest.mark.parametrize("target", GPUS)
def test_it_compiles_and_the_check_finds_nothing(target):
    report = compiled(kernels.compiled(draw, target))
    assert report.ok, str(report)
