"""The kernel that the runtime itself launches, of one program.

Nothing of the runtime imports this before a kernel is to be launched that Triton compiles: worlds
whose calls come from an artefact do without Triton. So what is compiled is counted from here on."""

from __future__ import annotations

import torch
import triton

import weft.language as wl
from weft.language import triton_api
from weft.language.world_arg import WorldArg
from weft.runtime import compilations

triton_api.when_compiled(compilations.compiles)


def world_arg(table: torch.Tensor, num_ranks: int, version: int) -> WorldArg:
    """What kernels take of a world."""
    return WorldArg(table, *map(triton_api.constexpr, (num_ranks, version)))


@triton.jit(do_not_specialize=["channel"])
def barrier(world, channel):
    """All ranks meet on this channel: releases what came before, acquires what follows."""
    wl.barrier(world, channel)
