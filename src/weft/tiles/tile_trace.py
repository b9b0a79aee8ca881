"""What templates leave of each tile where the world keeps a trace: when it waited, began, ended.

Not a hook, since nothing of it is an operator's: a template asks whether any world among its hooks'
arguments keeps a trace, which is a constant (weft.language.world_arg). Then it says what happens to
its tiles; elsewhere this leaves no instruction. Records lie as world_layout's TRACE_* say, one for
each unit of a launch's order; a launch writes over those of the launch before.

Source  docs/decisions/020-timestamps.md
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import weft.language as wl
from weft.language import triton_api as api
from weft.language import world_layout as layout
from weft.language.world_arg import WorldArg, is_traced_version

TRACE_PTR = tl.constexpr(layout.TRACE_PTR)
TRACE_TILES = tl.constexpr(layout.TRACE_TILES)
TILE = tl.constexpr(layout.TRACE_TILE)
PROGRAM = tl.constexpr(layout.TRACE_PROGRAM)
START = tl.constexpr(layout.TRACE_START)
WAITED = tl.constexpr(layout.TRACE_WAITED)
BEGUN = tl.constexpr(layout.TRACE_BEGUN)
SUMMED = tl.constexpr(layout.TRACE_SUMMED)
COMBINED = tl.constexpr(layout.TRACE_COMBINED)
END = tl.constexpr(layout.TRACE_END)
EACH = tl.constexpr(layout.TRACE_EACH)
WORDS = tl.constexpr(layout.TRACE_WORDS)


@api.builtin
def kept(*args, _semantic=None):
    """The table of the first world in `args`, however deep, if that world keeps a trace, or None.

    A pointer, not the world: a tuple's constants become values where it is given a name.
    """
    world = next(_worlds(args), None)
    if world is None or not is_traced_version(api.unwrap(world.version)):
        return api.constexpr(None)
    return world.table


def _worlds(values: Any):
    for value in values:
        if api.tuple_fields(value) == WorldArg._fields:
            yield value
        elif api.is_tuple(value) or isinstance(value, tuple):
            yield from _worlds(value)


@triton.jit
def write(table, unit, word, value):
    """Word `word` of the record of `unit`; of units for which there is no room nothing is kept."""
    records = tl.load(table + TRACE_PTR).to(tl.pointer_type(tl.int64))
    place = records + tl.cast(unit, tl.int64) * WORDS + word
    tl.store(place, tl.cast(value, tl.int64), mask=unit < tl.load(table + TRACE_TILES))


@triton.jit
def open_record(table, unit, at, start, waited):
    """What tile it is, and when it began to wait for how long; behind the wait, not to be in it."""
    write(table, unit, TILE, (tl.cast(at.i_m, tl.int64) << 32) | tl.cast(at.i_n, tl.int64))
    write(table, unit, PROGRAM, tl.program_id(0))
    write(table, unit, START, start)
    write(table, unit, WAITED, waited)


@triton.jit
def stamp(table, unit, word):
    """The time, as word `word`."""
    write(table, unit, word, wl.timestamp())
