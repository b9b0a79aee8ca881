"""The kernel that the runtime itself launches, of one program."""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl


@triton.jit
def barrier(world, CHANNEL: tl.constexpr):
    """All ranks meet on this channel: releases what came before, acquires what follows."""
    wl.barrier(world, CHANNEL)
