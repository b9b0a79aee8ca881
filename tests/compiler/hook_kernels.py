"""A template with what docs/decisions/009-hooks.md has and the GEMM does not need: segments.

It sums segments of a vector, and keeps their maximum: a state of two tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class At(NamedTuple):
    """A tile, made by `order`; `group` is a number that is loaded."""

    i_m: Any
    i_n: Any
    group: Any


class Segment(NamedTuple):
    """What `ready` gives."""

    source: Any
    first: Any
    end: Any


class State(NamedTuple):
    """What `emit` is given."""

    total: Any
    highest: Any


@triton.jit
def order(i, num_m, args):
    return At(i % num_m, i // num_m, tl.load(args[0] + i))


@triton.jit
def segments(at, args):
    return at.group + 1


@triton.jit
def ready(at, segment, tile, args):
    return Segment(source=args[0], first=(segment + at.i_m) % 2 * tile, end=2 * tile)


@triton.jit
def combine(at, state, tile, args):
    i = at.i_n * tile + tl.arange(0, tile)
    return State(state.total + tl.load(args[0] + i), state.highest)


@triton.jit
def emit(at, state, tile, args):
    i = (at.i_n * 2 + at.i_m) * tile + tl.arange(0, tile)
    tl.store(args[0] + i, state.total + state.highest)


@triton.jit
def announce(at, part, args):
    tl.store(args[0] + at.i_n * 2 + at.i_m + part, 1)


@triton.jit
def one_tile(
    at,
    segments: tl.constexpr,
    ready: tl.constexpr,
    ready_args,
    combine: tl.constexpr,
    combine_args,
    emit: tl.constexpr,
    emit_args,
    announce: tl.constexpr,
    announce_args,
    tile: tl.constexpr,
):
    """The body of the template, without its loop: what a task of a persistent kernel calls."""
    state = State(tl.zeros((tile,), tl.float32), tl.full((tile,), -float("inf"), tl.float32))
    for segment in tl.range(0, segments(at, ready_args), flatten=False):
        given = ready(at, segment, tile, ready_args)
        i = given.first + tl.arange(0, tile)
        x = tl.load(given.source + i, mask=i < given.end, other=0.0)
        state = State(state.total + x, tl.maximum(state.highest, x))
    state = combine(at, state, tile, combine_args)
    emit(at, state, tile, emit_args)
    announce(at, 0, announce_args)


@triton.jit
def kernel(groups, x, out, done, num_tiles):
    for i in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=False):
        one_tile(
            order(i, 2, (groups,)),
            segments, ready, (x,), combine, (x,), emit, (out,), announce, (done,), 16,
        )  # fmt: skip
