"""How a product's tiles are dealt out to programs that are all resident, each in its order.

A program has units of work, every num_programs-th from its own on: whole tiles, then its part of
one of the last round's. Where that would leave more than half of the programs idle, its tiles are
shared: `parts` programs to a tile, each with a part of k. So are the `early` ones, the order's
first tiles, where an operator asks for it: if they are fewer than half of the programs, and all
others must wait for rows, then nobody is idle meanwhile. They are a round of their own, before the
whole ones; who has no part of them begins behind it.

Functions of integers: kernels and the host call the same.

Source  Stream-K (Osama et al. 2023) for the last round
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.tiles.blocking import Blocking

# More programs on one tile than these spend on each other's sums what they save on products.
MAX_PARTS = tl.constexpr(4)
# Steps of k that a part should have at least, to be worth its way through memory.
MIN_STEPS = tl.constexpr(8)


class Waves(NamedTuple):
    """How tiles are dealt out: `early` of them to `first_wave` programs each, as a round of its
    own; then `whole` to one each, then `shared` to `parts`."""

    num_m: Any
    num_n: Any
    num_k: Any
    early: Any
    first_wave: Any
    whole: Any
    shared: Any
    parts: Any


class Unit(NamedTuple):
    """Steps begin .. end - 1 of k of the order's tile `tile`, which `parts` programs share.

    `place` is where this part's sums lie, of `partial_flags` / 2 places; part p's lie `p * apart`
    behind part 0's.
    """

    tile: Any
    begin: Any
    end: Any
    part: Any
    parts: Any
    place: Any
    apart: Any


@triton.jit
def split_waves(num_m, n, k, tile_n, tile_k, num_programs, early=0, first_wave=1):
    """The Waves of a product among so many programs; `early * first_wave` are no more than those.

    With one part to a tile no tile is early.
    """
    early = early * min(first_wave - 1, 1)
    num_n = (n + tile_n - 1) // tile_n
    num_k = (k + tile_k - 1) // tile_k
    rest = num_m * num_n - early
    left = rest % num_programs
    parts = min(num_programs // max(left, 1), MAX_PARTS, max(num_k // MIN_STEPS, 1))
    shared = left * min(parts - 1, 1)
    return Waves(num_m, num_n, num_k, early, first_wave, rest - shared, shared, parts)


@triton.jit
def first_unit(program, waves, step):
    """Where a program begins: behind the early round, if it has no part of an early tile."""
    is_idle = min(program // max(waves.early * waves.first_wave, 1), 1)
    return program + min(waves.early, 1) * is_idle * step


@triton.jit
def end_unit(waves, step):
    return min(waves.early, 1) * step + waves.whole + waves.shared * waves.parts


@triton.jit
def unit_of(unit, waves, step):
    """Unit number `unit`, which is program unit % step's. Returns a Unit."""
    # Early tiles have a round of their own, however few programs have a part of them.
    behind = unit - min(waves.early, 1) * step
    tile = waves.early + behind
    part = 0
    parts = 1
    place = unit % step
    apart = waves.shared
    if behind < 0:
        tile = unit % max(waves.early, 1)
        part = unit // max(waves.early, 1)
        parts = waves.first_wave
        place += step
        apart = waves.early
    elif behind >= waves.whole:
        tile = waves.early + waves.whole + (behind - waves.whole) % waves.shared
        part = (behind - waves.whole) // waves.shared
        parts = waves.parts
    begin = part * waves.num_k // parts
    end = (part + 1) * waves.num_k // parts
    return Unit(tile, begin, end, part, parts, place, apart)


def waves_of(
    m: int, n: int, k: int, blocking: Blocking, num_programs: int, early: int = 0,
    first_wave: int = 1,
) -> Waves:  # fmt: skip
    """The same as `split_waves`, on the host."""
    num_m = (m + blocking.tile_m - 1) // blocking.tile_m
    waves = split_waves.fn(
        num_m, n, k, blocking.tile_n, blocking.tile_k, num_programs, early, first_wave
    )
    # Of Python integers and Triton's constants, Triton makes constants.
    return Waves(*[getattr(number, "value", number) for number in waves])


def units(program: int, waves: Waves, num_programs: int) -> list[Unit]:
    """A program's units in their order."""
    first = first_unit.fn(program, waves, num_programs)
    numbers = range(first, end_unit.fn(waves, num_programs), num_programs)
    return [unit_of.fn(unit, waves, num_programs) for unit in numbers]


def first_wave_of(num_tiles: int, num_k: int, num_programs: int) -> int:
    """How many programs each of so many early tiles may have; 1: they are no round of their own."""
    if not num_tiles:
        return 1
    return max(1, min(num_programs // num_tiles, MAX_PARTS.value, num_k // MIN_STEPS.value))


def partial_elements(tile_m: int, tile_n: int, num_programs: int, first_wave: int = 1) -> int:
    """How many fp32 sums all places hold: each program has one, and a second for early tiles."""
    return num_programs * tile_m * tile_n * min(first_wave, 2)


def partial_flags(num_programs: int, first_wave: int = 1) -> int:
    """How many words say that sums are there: one for each half of a place."""
    return 2 * num_programs * min(first_wave, 2)
