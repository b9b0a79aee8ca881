"""Kernels with transfers that do not block, and multicast ones that are only compiled."""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl


@triton.jit
def push(world, source, inbox, signal, out, HOW: tl.constexpr, SIZE: tl.constexpr):
    """To the right neighbour without blocking; HOW says what comes between put and signal."""
    at = tl.arange(0, SIZE)
    right = (wl.rank(world) + 1) % world.num_ranks
    wl.put_nbi(world, inbox + at, source + at, to=right)
    if HOW == "fence":
        wl.fence(world)
        wl.notify(world, signal, to=right)
    elif HOW == "fence, relaxed":
        wl.fence(world)
        wl.notify(world, signal, to=right, order=wl.Order.RELAXED)
    elif HOW == "quiet, overwrite":
        wl.quiet(world)
        tl.store(source + at, 0.0)
        wl.notify(world, signal, to=right)
    elif HOW == "fence, overwrite":
        wl.fence(world)
        tl.store(source + at, 0.0)
        wl.notify(world, signal, to=right)
    elif HOW == "relaxed":
        wl.notify(world, signal, to=right, order=wl.Order.RELAXED)
    else:
        wl.notify(world, signal, to=right)
    wl.wait(signal, at_least=1)
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def pull(world, source, inbox, out, QUIET: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    left = (wl.rank(world) + world.num_ranks - 1) % world.num_ranks
    wl.get_nbi(world, inbox + at, source + at, source=left)
    if QUIET:
        wl.quiet(world)
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def transfers(world, x, out, flags, n):
    i = tl.arange(0, 1024)
    wl.put_nbi(world, out + i, x + i, to=1, mask=i < n)
    wl.fence(world)
    wl.notify(world, flags, to=1, order=wl.Order.RELAXED)
    wl.get_nbi(world, x + i, out + i, source=2)
    wl.quiet(world)
    wl.notify(world, flags, to=2, order=wl.Order.RELAXED)


@triton.jit
def multicast(x, flags):
    i = tl.arange(0, 1024)
    wl.multimem_red(x + i, wl.multimem_ld_reduce(x + i))
    wl.multimem_st(x + i, 1.0)
    wl.multimem_red(flags + i, wl.multimem_ld_reduce(flags + i))
    wl.multimem_st(flags, 1)


@triton.jit
def by_warp(world, x, out):
    wl.put_warp(world, out, x, to=1)


@triton.jit
def which_warp(out):
    tl.store(out, wl.warp())
