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


@triton.jit
def announce(world, x, ready):
    """A kernel of rank 0: a row to rank 1, and a flag that is set to 1."""
    if wl.rank(world) == 0:
        send(world, x, 1)
        wl.notify(world, ready, 1, to=1, op=wl.SignalOp.SET)


@triton.jit
def use(world, x, ready, out):
    """A kernel: waits for the flag, reads the row."""
    wl.wait(ready, at_least=1, world=world)
    take(x, out)


@triton.jit
def stream_rows(world, x, ready, credit, out, rows, n: tl.constexpr):
    """A kernel: rows from rank 0 to rank 1 by a queue of three places, with credits."""
    if wl.rank(world) == 0:
        for i in range(rows):
            if i >= 3:
                wl.wait(credit, at_least=i - 2, world=world)
            send(world, x + i % 3 * n, 1)
            wl.notify(world, ready, to=1)
    else:
        for i in range(rows):
            wl.wait(ready, at_least=i + 1, world=world)
            take(x + i % 3 * n, out)
            wl.notify(world, credit, to=0)


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
