"""The kernel that the runtime itself launches, of one program."""

from __future__ import annotations

import triton

import weft.language as wl


@triton.jit(do_not_specialize=["channel"])
def barrier(world, channel):
    """All ranks meet on this channel: releases what came before, acquires what follows."""
    wl.barrier(world, channel)
