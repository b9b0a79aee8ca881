"""Kernels that ranks share between them, compiled without being launched."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft
from weft.language import triton_api
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


def test_nothing_is_held_on_the_emulator(ranks):
    """Its ranks are threads: what one holds, another would launch."""

    def main():
        world, walked = weft.init(), []
        assert compile_together(world, lambda: walked.append(1)) == (0, 0.0)
        assert not walked

    ranks(main, 2)
