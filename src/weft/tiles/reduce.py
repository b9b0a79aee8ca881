"""The reduction template: sums over parts, in the order of parts, in fp32, with two hooks.

    for each tile of elements i:
        total = part(0)[i] + part(1)[i] + ...          from left to right
        emit(i, total)                                 what becomes of the sum

The order of sums depends on nothing but the order of parts: results are bitwise equal over runs,
schedules, channels and ranks. A hook is a `@triton.jit` function, given as a constexpr together
with one tuple of arguments:

    part(index, i, mask, args) -> tile of any float dtype        see `load_part`
    emit(i, total, mask, args)                                   see `emit_store`
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Parts(NamedTuple):
    """Arguments of `load_part`: part `own` is at `x`, the others `stride` apart from `received`."""

    x: Any
    received: Any
    stride: Any
    own: Any


class Stored(NamedTuple):
    """Arguments of `emit_store`."""

    out: Any


@triton.jit
def load_part(index, i, mask, args):
    """A rank's own part where it lies, those of others where they were received. args: Parts"""
    source = args.received + args.stride * index
    if index == args.own:
        source = args.x
    return tl.load(source + i, mask=mask, other=0.0)


@triton.jit
def emit_store(i, total, mask, args):
    """The sum, rounded once. args: Stored"""
    tl.store(args.out + i, total.to(args.out.dtype.element_ty), mask=mask)


@triton.jit
def add(num_parts, part: tl.constexpr, part_args, i, mask):
    """One tile of sums."""
    total = part(0, i, mask, part_args).to(tl.float32)
    for index in range(1, num_parts):
        total += part(index, i, mask, part_args).to(tl.float32)
    return total


@triton.jit
def reduce(size, num_parts, part: tl.constexpr, part_args, emit: tl.constexpr, emit_args,
           block: tl.constexpr):  # fmt: skip
    """Sum `size` elements of `num_parts` parts, `block` at a time.

    Sync    what the hooks do; the parts must have come before
    """
    for start in range(0, size, block):
        i = start + tl.arange(0, block)
        mask = i < size
        emit(i, add(num_parts, part, part_args, i, mask), mask, emit_args)
