"""Kernels that exchange lines: a sound one with parts to leave out, and one of every form."""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl


@triton.jit
def sum_of_all(world, values, inbox, out, calls, n, LINES: tl.constexpr, SLOTS: tl.constexpr,
               STEP: tl.constexpr, LOOK: tl.constexpr):  # fmt: skip
    """One-shot all-reduce of n values, `calls` times. inbox: int64[SLOTS, num_ranks, LINES, 16].

    LOOK is how many lines' flags are waited for, all when 0; the others are read by plain loads.
    """
    dtype: tl.constexpr = values.dtype.element_ty
    at, is_data = wl.line_elements(LINES, dtype)
    is_data = is_data & (at < n)
    PER_LINE: tl.constexpr = 960 // dtype.primitive_bitwidth
    used = tl.cdiv(n, PER_LINE)
    rank = wl.rank(world)
    for call in range(calls):
        flag = 1 + call * STEP
        slot = inbox + (call % SLOTS) * world.num_ranks * LINES * 16
        mine = tl.load(values + call * n + at, mask=is_data, other=0)
        for peer in range(world.num_ranks):
            wl.put_lines(world, slot + rank * LINES * 16, mine, flag, to=peer, count=used)
        total = tl.zeros(at.shape, tl.float32)
        for peer in range(world.num_ranks):
            lines = slot + peer * LINES * 16
            if LOOK:
                wl.wait_lines(lines, flag, LINES, dtype=dtype, count=LOOK)
                words = lines.to(tl.pointer_type(dtype)) + (tl.arange(0, LINES) * 0 + 64)
                total += tl.load(words)[:, None].to(tl.float32)
            else:
                part = wl.wait_lines(lines, flag, LINES, dtype=dtype, count=used)
                total += part.to(tl.float32)
        tl.store(out + call * n + at, total, mask=is_data)


@triton.jit
def from_pointers(world, values, inbox, out, e, LINES: tl.constexpr):
    """Whole lines to the right neighbour, read through pointers."""
    dtype: tl.constexpr = values.dtype.element_ty
    at, is_data = wl.line_elements(LINES, dtype)
    right = (wl.rank(world) + 1) % world.num_ranks
    wl.put_lines(world, inbox, values + at, e, to=right)
    tl.store(out + at, wl.wait_lines(inbox, e, LINES, dtype=dtype), mask=is_data)


@triton.jit
def lines(world, x, flags64, n):
    """Every form, for compilers; with as many lines as 8 warps need."""
    at, is_data = wl.line_elements(32, tl.float32)
    mine = tl.load(x + at, mask=is_data, other=0)
    wl.put_lines(world, flags64 + n * 16, mine, n, to=1)
    wl.put_lines(world, flags64, x + at, n, to=n, count=n)
    tl.store(x + at, wl.wait_lines(flags64, n, 32, dtype=tl.float32), mask=is_data)
    at, is_data = wl.line_elements(32, tl.bfloat16)
    half = wl.wait_lines(flags64 + 16 * n, n, 32, dtype=tl.bfloat16, count=n)
    tl.store(x.to(tl.pointer_type(tl.bfloat16)) + at, half, mask=is_data)


@triton.jit
def unbounded(flags64, x):
    at, is_data = wl.line_elements(32, tl.float16)
    part = wl.wait_lines(flags64, 3, 32, dtype=tl.float16)
    tl.store(x.to(tl.pointer_type(tl.float16)) + at, part, mask=is_data)
