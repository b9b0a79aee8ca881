"""What tiles of a traced call did when, on all ranks, and what follows from it.

A world that keeps a trace (`weft.init(trace_tiles=..)`) has the GEMM templates leave a record of
each tile. Here these are read and put on one clock. `weft trace OP` shows them.

Units  ns by rank 0's clock
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from weft.base.spans import union, without
from weft.language import world_layout as layout


class Part(NamedTuple):
    """What one consumer did with its part of a tile, or all of it: multiplied from `begun` to
    `summed`, added what else belongs to it until `combined`, stored and announced until `end`."""

    begun: int
    summed: int
    combined: int
    end: int


class TileTimes(NamedTuple):
    """One tile of a rank: its program began to wait at `start`, for `waited`. `what` is its task,
    where tasks have names.

    On Hopper a warp waits and loads while others multiply the tile before.
    """

    rank: int
    program: int
    i_m: int
    i_n: int
    start: int
    waited: int
    parts: tuple[Part, ...]
    what: str = ""

    @property
    def end(self) -> int:
        return max((part.end for part in self.parts), default=self.start + self.waited)


def read(
    records: Iterable[Sequence[int]], rank: int, offset: int = 0, names: Sequence[str] = ()
) -> list[TileTimes]:
    """Records of a rank as `World.trace` holds them, in the order of their start.

    `offset` is what to add to this rank's clock; `names` are those of a persistent kernel's tasks
    (`Persistent.task_names`), one for each record.
    """
    found = []
    for number, words in enumerate(records):
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
        what = names[number] if number < len(names) else ""
        found.append(TileTimes(rank, program, *where, start + offset, waited, tuple(parts), what))
    return sorted(found, key=lambda tile: (tile.start, tile.program))


def waits_of(
    tiles: Sequence[TileTimes],
) -> Iterator[tuple[TileTimes, list[tuple[float, float]]]]:
    """When the program of each tile waited for it while none of its consumers computed."""
    computed: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for tile in tiles:
        own = computed[tile.rank, tile.program]
        for part in tile.parts:
            own += [(part.begun, part.summed), (part.combined, part.end)]
    joined = {program: union(spans) for program, spans in computed.items()}
    for tile in tiles:
        waited = (tile.start, tile.start + tile.waited)
        yield tile, without(waited, joined[tile.rank, tile.program])
