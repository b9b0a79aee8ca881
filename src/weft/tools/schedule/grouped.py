"""Grouped products: which rows are whose the device alone knows, so each rank is given as many of
every other's tokens as of its own."""

from __future__ import annotations

from typing import Any

from weft.ir.device import Launch
from weft.tools.schedule.cut import Cut


def mapped(cut: Cut, step: Launch) -> dict[str, Any]:
    """What the tables say of a tile: the same text for all, since the device alone knows more."""
    (name,) = step.announces
    channel = cut.channels[name]
    (m, top_k, _), columns = cut.extents(channel.table, 0), f"columns j * {step.tile[1]} …"
    text = f"row t of {channel.table}.tiles: slots first … end - 1 of one expert, of {m * top_k}, "
    text += f"in turn {channel.table}.turns; {columns}: "
    if any(do.kind == "all_gather" for do in step.body):
        words = [f"{name}[lo … hi][0 … {cut.number(channel.chunks) - 1}]"]
        return {"table": channel.table, "awaits": words,
                "text": f"{text}after {words[0]}, of the ranks whose tokens it has"}  # fmt: skip
    word = f"{name}[t][rank][j]"
    return {"table": channel.table, "announces": word,
            "text": f"{text}weighted rows stored in {step.pushes[0]} of ranks lo … hi, told by "
                    f"their {word}; a rank waits for all ranks' words of tiles with its tokens"
            }  # fmt: skip
