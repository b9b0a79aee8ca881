"""When programs end that take tiles in rounds: in closed form, whatever the number of tiles.

A program takes every num_programs-th tile of an order, each for the same time, and none before its
rows are there. Rows come in few arrivals, in the order of tiles. Of the tiles that wait for one of
them the first has the most rounds behind it, so it alone says when the last round ends:

    end = max over arrivals of (arrival + rounds from its first tile on * time of a tile)

The last round's tiles are shared over k, and so are those of a split-k first wave, as
tiles/tile_scheduler.py deals them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.tiles.tile_scheduler import Waves


class Arrival(NamedTuple):
    """The order's tile `tile`, and all behind it, begin at `us` or later."""

    us: float
    tile: int


class Rounds(NamedTuple):
    """`each_us` for a tile; a program that shares one needs `share_us` beside its part. The last
    `late` of the programs begin at `late_us`."""

    waves: Waves
    programs: int
    each_us: float
    share_us: float
    late: int = 0
    late_us: float = 0.0

    def end_us(self, arrivals: Sequence[Arrival]) -> float:
        """When the last program is done."""
        early, programs = self.waves.early, self.programs
        early_us = self.each_us / self.waves.first_wave + self.share_us
        units, first_late = early * self.waves.first_wave, programs - self.late
        sharing = self.waves.shared * self.waves.parts
        # Of programs that begin alike the first has the most rounds.
        end = self._own_us(early_us if early else 0.0, 0)
        if units:
            end = max(end, self._own_us(0.0, units))
        if self.late:
            for first in {first_late, max(first_late, units)}:
                begin = self.late_us + (early_us if first < units else 0.0)
                end = max(end, self._own_us(begin, first))
        for us, tile in arrivals:
            if tile < early:
                end = max(end, self._own_us(us + early_us, tile))
            behind = max(0, tile - early)
            end = max(end, self._own_us(us, behind))
            if behind % programs >= sharing > 0:
                # The first programs have a round less behind it, and share a tile.
                end = max(end, self._own_us(us, behind - behind % programs + programs))
        return end

    def _own_us(self, begin_us: float, tile: int) -> float:
        """When a program is done that begins with `tile`, of those behind the early ones."""
        _, _, _, _, _, whole, shared, parts = self.waves
        rounds = (whole - 1 - tile) // self.programs + 1
        end = begin_us + rounds * self.each_us if rounds > 0 else begin_us
        if tile % self.programs < shared * parts:
            end += self.each_us / parts + self.share_us
        return end
