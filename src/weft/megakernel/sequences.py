"""What tiles of a decode step need of caches, where sequences lie one behind the other.

    attended[i, h]   rows i * max_kv .. (i + 1) * max_kv - 1 of both caches, columns of its head
    parts[i * splits + s, h]    the same: which of these keys a split has the lengths say
    merged[i, h]     rows i * splits .. (i + 1) * splits - 1 of the parts
    appended[i, c]   row i of what is appended

Task IR says *all* of them, since how many rows a sequence has is no factor that it knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from weft.compiler.passes.tile import Region, held_by, number
from weft.ir.shapes import sizes_of
from weft.ir.task import Program, Task, needs_of
from weft.ir.tensor import Type

# Keys of a tile at a time.
KEYS = 64
# Kinds whose tiles read all keys that a head of a sequence has, or a split of them.
OF_KEYS = ("decode_attention", "attention_parts")


def needed_by(
    task: Task, region: Region, kinds: Sequence[Type], sizes: Mapping[str, int]
) -> dict[int, Region]:
    """Of operands, by index, what a tile that covers `region` needs; only where it is less than
    what Task IR says. `kinds` are the operands' types."""
    if task.kind == "merge_parts":
        rows = (row * (task.splits or 1) for row in region[:2])
        return {0: Region(*rows, *(2 * column for column in region[2:]))}
    if task.kind not in ("kv_append", *OF_KEYS):
        return {}
    extents = [tuple(number(size, sizes) for size in kind.sizes) for kind in kinds[:2]]
    if task.kind == "kv_append":
        (rows, _), (sequences, _) = extents
        each = max(1, rows // max(1, sequences))
        first, end = region.first_row // each, -(-region.end_row // each)
        return {1: region._replace(first_row=first, end_row=end)}
    (sequences, columns), (rows, kv_columns) = extents
    each, head = rows // max(1, sequences), task.head or 1
    less = {}
    if splits := task.splits:
        ends = -(-region.end_row // splits), region.end_column // 2
        region = Region(region.first_row // splits, ends[0], region.first_column // 2, ends[1])
        less[0] = region
    # Neighbouring heads of queries share one of the cache.
    first = region.first_column * kv_columns // columns // head * head
    end = -(-region.end_column * kv_columns // (columns * head)) * head
    needed = Region(region.first_row * each, region.end_row * each, first, min(end, kv_columns))
    return {**less, 1: needed, 2: needed}


def split_keys(
    program: Program, sizes: Mapping[str, int], num_ranks: int, num_workers: int, splits: int = 0
) -> Program:
    """The tiled program with attention of a decode step in two steps, where more tasks than it has
    tiles keep workers busy: parts of the keys, then the parts together.

    Shapes  splits: how many parts, wherever heads can be so split; 0: as many as there are workers
            for, each of a tile of keys at least if a cache is full
    """
    tasks: list[Task] = []
    for task in program.tasks:
        number_of = 1
        if task.kind == "decode_attention" and task.head and not task.head & (task.head - 1):
            number_of = splits or _splits_of(task, program, sizes, num_ranks, num_workers)
        tasks += [task] if number_of == 1 else _in_parts(task, program, number_of)
    return replace(program, tasks=tuple(tasks))


def _splits_of(
    task: Task, program: Program, sizes: Mapping[str, int], num_ranks: int, num_workers: int
) -> int:
    kinds = [program.task(name).type for name in (task.name, task.operands[1])]
    made, cache = (held_by(kind, 0, sizes, num_ranks).extents for kind in kinds if kind)
    tiles = made[0] * -(-made[1] // task.tile[1])
    keys = cache[0] // max(1, made[0])
    found = min(num_workers // max(1, tiles), keys // KEYS)
    # Half of the workers read caches as fast as all of them do: two parts do not pay for a merge.
    return found if found > 2 else 1


def _in_parts(task: Task, program: Program, splits: int) -> Iterator[Task]:
    """What `task` is in so many splits."""
    names = {one.name for one in program.tasks}
    name = next(one for one in _free_names(f"{task.name}_parts") if one not in names)
    parts = replace(
        task, name=name, kind="attention_parts", splits=splits, dtype="float32",
        tile=(1, 2 * task.tile[1]),
    )  # fmt: skip
    assert task.type is not None and task.head is not None
    operands = [program.task(one).type for one in task.operands]
    shape = sizes_of(parts, [kind for kind in operands if kind])
    parts = replace(parts, type=Type("float32", shape, task.type.placement))
    merged = replace(
        task, kind="merge_parts", operands=(name,), splits=splits, dtype=task.type.dtype,
        tile=(1, task.head),
    )  # fmt: skip
    for one in (parts, merged):
        yield replace(one, needs=needs_of(one))


def _free_names(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{i}" for i in count(2))
