"""Kernels that exchange packets: a sound one with parts to leave out, and one of every form."""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl


@triton.jit
def sum_of_all(world, values, inbox, out, calls, SIZE: tl.constexpr, SLOTS: tl.constexpr,
               STEP: tl.constexpr, WAIT: tl.constexpr):  # fmt: skip
    """One-shot all-reduce, `calls` times. inbox: int64[SLOTS, num_ranks, SIZE], zeroed.

    SLOTS=2 is sound: packets of call e say that their sender has read those of call e - 1.
    """
    at = tl.arange(0, SIZE)
    rank = wl.rank(world)
    for call in range(calls):
        flag = 1 + call * STEP
        slot = inbox + (call % SLOTS) * world.num_ranks * SIZE
        mine = tl.load(values + call * SIZE + at)
        for peer in range(world.num_ranks):
            wl.put_packets(world, slot + rank * SIZE + at, mine, flag, to=peer)
        total = tl.zeros((SIZE,), tl.float32)
        for peer in range(world.num_ranks):
            if WAIT:
                total += wl.wait_packets(slot + peer * SIZE + at, flag, dtype=tl.float32)
            else:
                packets = tl.load(slot + peer * SIZE + at)
                total += packets.to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(out + call * SIZE + at, total)


@triton.jit
def one_call(world, values, inbox, out, e, SIZE: tl.constexpr):
    """The same, one call per launch, on the half that the call's number says."""
    at = tl.arange(0, SIZE)
    slot = inbox + (e % 2) * world.num_ranks * SIZE
    for peer in range(world.num_ranks):
        wl.put_packets(world, slot + wl.rank(world) * SIZE + at, values + at, e, to=peer)
    total = tl.zeros((SIZE,), tl.float32)
    for peer in range(world.num_ranks):
        total += wl.wait_packets(slot + peer * SIZE + at, e, dtype=tl.float32)
    tl.store(out + at, total)


@triton.jit
def pass_on(world, data, inbox, out, SIGNAL: tl.constexpr):
    """Packets order nothing but themselves: `data` needs a signal of its own. inbox: int64[2]."""
    if wl.rank(world) == 0:
        wl.put(world, data, 7.0, to=1)
        wl.put_packets(world, inbox, 1, 1, to=1)
        if SIGNAL:
            wl.notify(world, inbox + 1, to=1)
    if wl.rank(world) == 1:
        wl.wait_packets(inbox, 1)
        if SIGNAL:
            wl.wait(inbox + 1, at_least=1)
        tl.store(out, tl.load(data))


@triton.jit
def tail(world, values, inbox, out, n, SIZE: tl.constexpr):
    """A ragged tile to the right neighbour, a scalar behind it."""
    at = tl.arange(0, SIZE)
    right = (wl.rank(world) + 1) % world.num_ranks
    wl.put_packets(world, inbox + at, values + at, 3, to=right, mask=at < n)
    wl.put_packets(world, inbox + SIZE, n, 3, to=right)
    count = wl.wait_packets(inbox + SIZE, 3, world=world)
    tl.store(out + at, wl.wait_packets(inbox + at, 3, mask=at < n, dtype=tl.float32))
    tl.store(out + SIZE, count.to(tl.float32))


@triton.jit
def narrow(world, values, inbox, one, out, n, SIZE: tl.constexpr, SHARE: tl.constexpr):
    """Values of which SHARE share a packet, to the right neighbour."""
    dtype: tl.constexpr = values.dtype.element_ty
    words, at = tl.arange(0, SIZE), tl.arange(0, SIZE * SHARE)
    few = words < n
    right = (wl.rank(world) + 1) % world.num_ranks
    wl.put_packets(world, inbox + words, tl.load(values + at), 3, to=right)
    wl.put_packets(world, inbox + SIZE + words, values + at, 3, to=right, mask=few)
    wl.put_packets(world, inbox + 2 * SIZE + words, tl.load(values + 1), 3, to=right)
    wl.put_packets(world, one, values + 1, 3, to=right)
    first = wl.wait_packets(inbox + words, 3, dtype=dtype)
    second = wl.wait_packets(inbox + SIZE + words, 3, mask=few, dtype=dtype)
    third = wl.wait_packets(inbox + 2 * SIZE + words, 3, dtype=dtype)
    tl.store(out + at, first)
    tl.store(out + SIZE * SHARE + at, second)
    tl.store(out + 2 * SIZE * SHARE + at, third)
    tl.store(out + 3 * SIZE * SHARE, wl.wait_packets(one, 3, dtype=dtype))


@triton.jit
def half_packets(world, x, flags64, n):
    half = x.to(tl.pointer_type(tl.bfloat16))
    narrow(world, half, flags64, flags64 + 1024, half, n, 256, 2)


@triton.jit
def byte_packets(world, x, flags64, n):
    byte = x.to(tl.pointer_type(tl.int8))
    narrow(world, byte, flags64, flags64 + 1024, byte, n, 256, 4)


@triton.jit
def packets(world, x, flags, flags64, n):
    """Every form, for compilers."""
    i = tl.arange(0, 1024)
    wl.put_packets(world, flags64 + i, x + i, n, to=1)
    wl.put_packets(world, flags64 + i, n, 1, to=n, mask=i < n)
    wl.put_packets(world, flags64, 1.5, n, to=0)
    a = wl.wait_packets(flags64 + i, n, dtype=tl.float32)
    b = wl.wait_packets(flags64 + i, 1, mask=i < n, dtype=tl.float32)
    c = wl.wait_packets(flags64, n, dtype=tl.float32)
    rows = tl.arange(0, 8)[:, None] * 4 + tl.arange(0, 4)[None, :]
    d = wl.wait_packets(flags64 + rows, n)
    tl.store(x + i, a + b + c)
    tl.store(flags + rows, d)


@triton.jit
def unbounded(flags64, x):
    i = tl.arange(0, 256)
    tl.store(x + i, wl.wait_packets(flags64 + i, 5, dtype=tl.float32))
