"""Kernels with transfers that do not block."""

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
def push_by_warps(world, source, inbox, signal, out, calls, ARRIVALS: tl.constexpr,
                  SIZE: tl.constexpr):  # fmt: skip
    """To the right neighbour; the receiver waits for ARRIVALS of each warp's signals, all when 0.

    signal: one word for data, one for the credit to overwrite it.
    """
    at = tl.arange(0, SIZE)
    right = (wl.rank(world) + 1) % world.num_ranks
    left = (wl.rank(world) + world.num_ranks - 1) % world.num_ranks
    for call in range(calls):
        wl.wait(signal + 1, at_least=call * wl.num_warps())
        wl.put_signal_warp(world, inbox + at, source + call * SIZE + at, signal, to=right)
        if ARRIVALS:
            wl.wait(signal, at_least=call * wl.num_warps() + ARRIVALS)
        else:
            wl.wait(signal, at_least=(call + 1) * wl.num_warps())
        tl.store(out + call * SIZE + at, tl.load(inbox + at))
        wl.notify_warp(world, signal + 1, to=left)


@triton.jit
def by_warps(world, x, out, flags, flags64, n):
    """Every form, for compilers; straight down to the wait."""
    i = tl.arange(0, 1024)
    v = tl.load(x + i)
    wl.put_signal_warp(world, out + i, v, flags, to=1)
    wl.put(world, out + 1024 + i, v * 2, to=1)
    wl.notify_warp(world, flags64, n, to=wl.rank(world), scope=wl.Scope.DEVICE)


@triton.jit
def by_warps_tma(world, x, out, flags):
    """An asynchronous store is complete before its warp signals."""
    target = tl.make_tensor_descriptor(out, [64, 64], [64, 1], [64, 64])
    i = tl.arange(0, 64)
    target.store([0, 0], tl.load(x + i[:, None] * 64 + i[None, :]))
    wl.notify_warp(world, flags, to=1)
