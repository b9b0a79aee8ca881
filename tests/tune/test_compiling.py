"""Kernels that ranks share between them, compiled without being launched."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft
from weft.language import triton_api
from weft.ops.all_gather import all_gather
from weft.tune.compiling import compile_together


@triton.jit
def fill(x, value, block: tl.constexpr):
    tl.store(x + tl.arange(0, block), value)


def test_held_launches_change_nothing_and_are_told_apart(ranks):
    def main():
        world = weft.init()
        x = torch.zeros(16, dtype=torch.int32, device=world.device)
        with triton_api.held_launches() as held:
            fill[(1,)](x, 3, 16)
            fill[(1,)](x, 5, 16)
            fill[(1,)](x, 1, 16)
            fill[(1,)](x, 3, 8)
        assert len(held) == 3  # 3 and 5 are one kernel
        for compile_one in held.values():
            compile_one()
        assert not x.any()
        fill[(1,)](x, 3, 16)
        assert (x == 3).all()

    ranks(main, 1)


def test_operators_work_after_their_kernels_were_compiled(ranks):
    def main():
        world = weft.init()
        x = torch.full((2, 8), world.rank + 1.0)
        count, seconds = compile_together(world, lambda: all_gather(x, world=world))
        assert count == 1 and seconds > 0
        assert all_gather(x, world=world)[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
        world.close()

    ranks(main, 3)
