"""What tiles of a traced call did when, on all ranks, and what follows from it.

A world that keeps a trace (`weft.init(trace_tiles=..)`) has the GEMM templates leave a record of
each tile. Here these are read, put on one clock and added up: how long programs waited, how long
they computed, which tiles waited longest. `weft timeline OP --traced` shows it.

Units  ns by rank 0's clock in records; in figures microseconds
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.base.spans import total, union, without
from weft.language import world_layout as layout

# So many of a rank's waits are named.
LONGEST = 5


class Part(NamedTuple):
    """What one consumer did with its part of a tile, or all of it: multiplied from `begun` to
    `summed`, added what else belongs to it until `combined`, stored and announced until `end`."""

    begun: int
    summed: int
    combined: int
    end: int


class TileTimes(NamedTuple):
    """One tile of a rank: its program began to wait at `start`, for `waited`.

    On Hopper a warp waits and loads while others multiply the tile before.
    """

    rank: int
    program: int
    i_m: int
    i_n: int
    start: int
    waited: int
    parts: tuple[Part, ...]

    @property
    def end(self) -> int:
        return max((part.end for part in self.parts), default=self.start + self.waited)


class Figures(NamedTuple):
    """One rank's times in microseconds, of its programs added up.

    `waiting_us` is what programs waited for operands and computed nothing. `combining_us` is from
    the last product to the sum with what other ranks sent, which is mostly waiting for it; on
    Hopper of the tile's first columns. `computing_us` is the rest of a tile, and `busy` its part of
    the time of all programs from the first tile to the last.
    """

    rank: int
    programs: int
    tiles: int
    first_us: float
    end_us: float
    waiting_us: float
    computing_us: float
    combining_us: float
    busy: float
    longest_waits: list[dict[str, Any]]


def read(records: Iterable[Sequence[int]], rank: int, offset: int = 0) -> list[TileTimes]:
    """Records of a rank as `World.trace` holds them, in the order of their start.

    `offset` is what to add to this rank's clock.
    """
    found = []
    for words in records:
        start = words[layout.TRACE_START]
        if not start:
            continue
        waited = words[layout.TRACE_WAITED]
        tile = words[layout.TRACE_TILE]
        parts = []
        for first in range(layout.TRACE_BEGUN, layout.TRACE_WORDS, layout.TRACE_EACH):
            begun, summed, combined, end = words[first : first + layout.TRACE_EACH]
            if end:
                # Who multiplies may stand ready before the tile's rows are there.
                times = (max(begun, start + waited), summed, combined or summed, end)
                parts.append(Part(*[time + offset for time in times]))
        program = words[layout.TRACE_PROGRAM]
        where = (tile >> 32, tile & 0xFFFFFFFF)
        found.append(TileTimes(rank, program, *where, start + offset, waited, tuple(parts)))
    return sorted(found, key=lambda tile: (tile.start, tile.program))


def waits_of(tiles: Sequence[TileTimes]) -> list[tuple[TileTimes, list[tuple[float, float]]]]:
    """When the program of each tile waited for it and computed nothing. tiles: of one program"""
    computed = computed_in(tiles)
    return [(tile, without((tile.start, tile.start + tile.waited), computed)) for tile in tiles]


def computed_in(tiles: Sequence[TileTimes]) -> Sequence[tuple[float, float]]:
    """When at least one consumer multiplied or stored. tiles: of one program"""
    parts = [part for tile in tiles for part in tile.parts]
    spans = [(part.begun, part.summed) for part in parts]
    return union([*spans, *((part.combined, part.end) for part in parts)])


def by_program(tiles: Iterable[TileTimes]) -> Mapping[int, list[TileTimes]]:
    found: dict[int, list[TileTimes]] = defaultdict(list)
    for tile in tiles:
        found[tile.program].append(tile)
    return found


def figures(tiles: Sequence[TileTimes], rank: int, begin: int) -> Figures:
    """Of one rank's tiles; times are counted from `begin`."""
    if not tiles:
        return Figures(rank, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, [])
    programs = by_program(tiles)
    waiting = computing = 0
    for own in programs.values():
        waiting += sum(total(spans) for _, spans in waits_of(own))
        computing += total(computed_in(own))
    combining = sum(part.combined - part.summed for tile in tiles for part in tile.parts)
    first, end = min(tile.start for tile in tiles), max(tile.end for tile in tiles)
    whole = len(programs) * (end - first)
    longest = sorted(tiles, key=lambda tile: (-tile.waited, tile.i_m, tile.i_n))[:LONGEST]
    return Figures(
        rank, len(programs), len(tiles), us(first - begin), us(end - begin), us(waiting),
        us(computing), us(combining), round(computing / whole, 4) if whole else 0.0,
        [{"tile": [tile.i_m, tile.i_n], "program": tile.program, "at_us": us(tile.start - begin),
          "waited_us": us(tile.waited)} for tile in longest if tile.waited > 0],
    )  # fmt: skip


def us(ns: float) -> float:
    return round(ns / 1e3, 3)
