"""What the programs of wrong/ and right/ share: a row that is sent, and a row that is taken."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl

N = 16  # elements of a row
ROW = tl.constexpr(N)


@triton.jit
def lanes():
    return tl.arange(0, ROW)


@triton.jit
def send(world, x, to):
    """Write a row to `x` on rank `to`; nobody is told."""
    wl.put(world, x + lanes(), lanes().to(tl.float32), to=to)


@triton.jit
def take(x, out):
    """Read a row; nothing is waited for."""
    tl.store(out + lanes(), tl.load(x + lanes()))


@triton.jit
def fill(x):
    """Write a row here."""
    tl.store(x + lanes(), lanes().to(tl.float32))


def row(world):
    """A symmetric row of zeros."""
    return world.zeros((N,), torch.float32, name="x")


def launch_once(world, kernel):
    """`kernel(world, x, ready, out)` by one program per rank: a row, a signal, a local row."""
    kernel[(1,)](world.arg, row(world), world.signals(1, name="ready"), torch.empty(N))


def launch_times(world, kernel, times):
    """The same again and again, on one row and one signal."""
    x, ready, out = row(world), world.signals(1, name="ready"), torch.empty(N)
    for call in range(times):
        kernel[(1,)](world.arg, x, ready, out, call + 1)
