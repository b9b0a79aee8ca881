"""Hooks of the GEMM templates, by role; a kernel that names one as `hooks.scatter.push` finds it.

partition    how rows are split over ranks and cut into tiles, and which signal word is whose
order        which tile is next
reduce       `combine`: other ranks' shares are added to a tile
scatter      `emit`: a tile goes to other ranks, or is stored; `collect` what they have sent
epilogue     what is done to a tile on its way to memory, element by element
feed         own rows go to all ranks before the product
scales       those of fp8 rows go to all ranks, and to the tiles of the product
table        all of these where the device has written tables of tiles (experts)
"""

from weft.tiles.hooks import (
    epilogue,
    feed,
    order,
    partition,
    reduce,
    scatter,
    table,
)

__all__ = ["epilogue", "feed", "order", "partition", "reduce", "scatter", "table"]
