"""How a router's slots are cut into tiles of products."""

from __future__ import annotations

FEWEST, MOST = 32, 128


def tile_rows(slots: int, experts: int) -> int:
    """Slots of a tile, at most, where experts have so many in all: a tile holds what almost every
    expert has, since a second one reads its matrix again. On an H100 tiles of 32 took as long as
    those of 16, and where tokens choose few experts they are half as many."""
    wanted = 3 * slots // (2 * max(1, experts))
    return min(MOST, max(FEWEST, 1 << max(0, wanted - 1).bit_length()))
