"""The few kernels that the runtime itself launches; one program each."""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl


@triton.jit
def barrier(world, CHANNEL: tl.constexpr):
    """All ranks meet on this channel: releases what came before, acquires what follows."""
    wl.barrier(world, CHANNEL)


@triton.jit
def wait_signal(world, signal, at_least):
    """A stream waits for a peer: launched upstream of every grid that fills the GPU."""
    wl.wait(signal, tl.load(at_least), world=world)


@triton.jit
def notify_signal(world, signal, value, TO: tl.constexpr):
    """A stream tells a peer: SETs its word to the value that is in memory when this runs."""
    wl.notify(world, signal, tl.load(value), to=TO, op=wl.SignalOp.SET)
