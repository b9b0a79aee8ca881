"""What tiles of a decode step need of caches, where sequences lie one behind the other.

    attended[i, h]   rows i * max_kv .. (i + 1) * max_kv - 1 of both caches, columns of its head
    appended[i, c]   row i of what is appended

Task IR says *all* of them, since how many rows a sequence has is no factor that it knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.compiler.passes.tile import Region, number
from weft.ir.task import Task, Type


def needed_by(
    task: Task, region: Region, kinds: Sequence[Type], sizes: Mapping[str, int]
) -> dict[int, Region]:
    """Of operands, by index, what a tile that covers `region` needs; only where it is less than
    what Task IR says. `kinds` are the operands' types."""
    if task.kind not in ("kv_append", "decode_attention"):
        return {}
    extents = [tuple(number(size, sizes) for size in kind.sizes) for kind in kinds[:2]]
    if task.kind == "kv_append":
        (rows, _), (sequences, _) = extents
        each = max(1, rows // max(1, sequences))
        first, end = region.first_row // each, -(-region.end_row // each)
        return {1: region._replace(first_row=first, end_row=end)}
    (sequences, columns), (rows, kv_columns) = extents
    each, head = rows // max(1, sequences), task.head or 1
    # Neighbouring heads of queries share one of the cache.
    first = region.first_column * kv_columns // columns // head * head
    end = -(-region.end_column * kv_columns // (columns * head)) * head
    needed = Region(region.first_row * each, region.end_row * each, first, min(end, kv_columns))
    return {1: needed, 2: needed}
