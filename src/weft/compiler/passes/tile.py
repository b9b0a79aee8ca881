"""Cut every task into tiles and say which region of its operands a tile needs.

    tile=(32, 32), needs=(Need(g, (Along(0), All())), Need(w, (All(), Along(1))))

Which tiles depend on which follows by intersection, when sizes and ranks are known.
Everything is in coordinates of the global tensors, so ranks and their ragged parts need no special
case: a rank's tiles are cut within what it holds, an operand's region may meet several of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from typing import NamedTuple

from weft.base.errors import ConfigError
from weft.base.parts import part_of
from weft.ir.core import wrong_tile
from weft.ir.kinds import KINDS, PRODUCTS, All, Along, ByTable, Need
from weft.ir.shapes import per_sequence
from weft.ir.task import TRAVELLING, Program, Task, needs_of
from weft.ir.tensor import TABLE, Size, Times, Type, is_split

DEFAULT = (128, 128)


class Region(NamedTuple):
    """Rows first_row .. end_row - 1 and columns first_column .. end_column - 1."""

    first_row: int
    end_row: int
    first_column: int
    end_column: int

    @property
    def extents(self) -> tuple[int, int]:
        return self.end_row - self.first_row, self.end_column - self.first_column

    def within(self, other: Region) -> Region:
        """What both have; empty where they do not meet."""
        first_row, first_column = max(self[0], other[0]), max(self[2], other[2])
        end_row, end_column = min(self[1], other[1]), min(self[3], other[3])
        return Region(
            first_row, max(first_row, end_row), first_column, max(first_column, end_column)
        )

    @property
    def is_empty(self) -> bool:
        return self.first_row >= self.end_row or self.first_column >= self.end_column


class Tile(NamedTuple):
    """Tile (i_m, i_n) of a task on a rank."""

    task: str
    rank: int
    i_m: int
    i_n: int


def tile(program: Program, extents: Mapping[str, tuple[int, ...]] | None = None) -> Program:
    """`extents` are those of tasks by name; the others have what an earlier pass has given, or
    DEFAULT. Within a kernel the tiles are those of its first task.

    Raises  ConfigError: extents of no task, or that are no extents; of a kernel's product, such as
            its template does not take
    """
    extents = extents or {}
    names = [task.name for task in program.tasks if task.kind != "input"]
    if unknown := [name for name in extents if name not in names]:
        message = f"extents for {', '.join(unknown)}, but its tasks are {', '.join(names)}"
        raise ConfigError(f"{program.name}: {message}", place=program.place)
    tasks = []
    for task in program.tasks:
        if task.kind != "input":
            cut = tuple(extents.get(task.name) or _cut(task, tasks))
            if len(cut) not in ((2, 3) if task.kind in PRODUCTS else (2,)) or min(cut) < 1:
                message = f"{program.name}: {task.name} has tile={cut}; it is (rows, columns)"
                raise ConfigError(message, place=task.place)
            if task.kernel and task.kind in PRODUCTS:
                cut = _for_template(program, task, cut)
            task = replace(task, tile=cut, needs=needs_of(task))
        tasks.append(task)
    return replace(program, tasks=tuple(tasks), stage="tiled")


def is_cut_whole(kinds: Iterable[str]) -> bool:
    """Are the tiles of a product cut from all rows, in a kernel of tasks of these kinds? Where they
    travel they are cut from each rank's part, since ranks signal them to each other."""
    return not {*TRAVELLING, "grouped_matmul"} & {*kinds}


def _for_template(program: Program, task: Task, cut: tuple[int, ...]) -> tuple[int, ...]:
    """Of a kernel's product: rows, columns and k, of which the last may be left as it is.

    Raises  ConfigError: a tile that no template has
    """
    cut = (*cut, *task.tile[2:]) if len(cut) == 2 else cut
    kinds = [one.kind for one in program.of_kernel(task.kernel)]
    if message := wrong_tile("gemm", cut, is_static="grouped_matmul" not in kinds):
        raise ConfigError(
            f"{program.name}: {task.name} has tile={cut}; {message}", place=task.place
        )
    return cut


def _cut(task: Task, before: Sequence[Task]) -> tuple[int, ...]:
    """The extents of a task of which the user says nothing."""
    if task.tile:
        return task.tile
    if task.kind in ("kv_append", "decode_attention"):
        return _of_sequence(task, {one.name: _type(one) for one in before})
    source = next((one for one in before if one.name in task.operands and one.tile), None)
    if not task.kernel or source is None or source.kernel != task.kernel:
        is_row = task.kernel and task.kind in ("all_reduce", "scatter_rows") and task.type
        return (1, number(_type(task).sizes[1], {})) if is_row else DEFAULT
    rows, columns = source.tile[:2]
    region = KINDS[task.kind].region[task.operands.index(source.name)]
    times = region[1].times if isinstance(region[1], Along) else 1
    if columns % times:
        message = (
            f"{task.name} takes {times} columns at a time, tiles of {source.name} have {columns}"
        )
        raise ConfigError(message, place=task.place)
    return rows, columns // times


def _of_sequence(task: Task, types: Mapping[str, Type]) -> tuple[int, ...]:
    """A sequence's part of a cache; the queries that share a head of it."""
    q, k = (types[name].sizes for name in task.operands[:2])
    if task.kind == "kv_append":
        return per_sequence(q[0], k[0]) or 1, DEFAULT[1]
    assert task.head is not None
    return 1, number(q[1], {}) // (number(k[1], {}) // task.head)


def tiles_within(task: Task, rank: int, held: Region) -> Iterator[Tile]:
    """The tiles that a task's extents cut `held` into, row by row."""
    num_m, num_n = (ceil(extent / size) for extent, size in zip(held.extents, task.tile))
    for i_m, i_n in product(range(num_m), range(num_n)):
        yield Tile(task.name, rank, i_m, i_n)


def region_within(task: Task, one: Tile, held: Region) -> Region:
    """What one of `tiles_within` covers."""
    row, column = (
        held.first_row + one.i_m * task.tile[0],
        held.first_column + one.i_n * task.tile[1],
    )
    return Region(row, row + task.tile[0], column, column + task.tile[1]).within(held)


def needed_of(need: Need, region: Region, kind: Type, sizes: Mapping[str, int]) -> Region:
    """What a tile that covers `region` needs of an operand of type `kind`; of what a table says,
    all, as far as is known before."""
    bounds: list[int] = []
    for axis, size in zip(need.region, kind.sizes):
        if isinstance(axis, All | ByTable):
            bounds += (0, number(size, sizes))
        else:
            first, end = region[2 * axis.dim : 2 * axis.dim + 2]
            bounds += (first * axis.times, end * axis.times)
    return Region(*bounds)


def held_by(kind: Type, rank: int, sizes: Mapping[str, int], num_ranks: int) -> Region:
    """What a rank has of a global tensor; of a Partial one, a summand of all of it; of one by
    experts, room for all of it. Tables are one tile."""
    if kind.dtype == TABLE:
        return Region(0, 1, 0, 1)
    return Region(*(bound for pair in bounds_of(kind, rank, sizes, num_ranks) for bound in pair))


def bounds_of(
    kind: Type, rank: int, sizes: Mapping[str, int], num_ranks: int
) -> list[tuple[int, int]]:
    """The indices first .. end - 1 that a rank has of each dimension."""
    extents = [number(size, sizes) for size in kind.sizes]
    return [
        part_of(size, rank, num_ranks) if is_split(kind.placement, dim) else (0, size)
        for dim, size in enumerate(extents)
    ]


def number(size: Size, sizes: Mapping[str, int]) -> int:
    """A size as a number."""
    if isinstance(size, Times):
        return size.by * sizes[size.size]
    return sizes[size] if isinstance(size, str) else size


def meeting(task: Task, rank: int, wanted: Region, held: Region) -> Iterator[Tile]:
    """The tiles on a rank that meet `wanted`, a part of what it has: by division, not by search."""
    if wanted.is_empty:
        return
    rows = range((wanted.first_row - held.first_row) // task.tile[0],
                 (wanted.end_row - 1 - held.first_row) // task.tile[0] + 1)  # fmt: skip
    columns = range((wanted.first_column - held.first_column) // task.tile[1],
                    (wanted.end_column - 1 - held.first_column) // task.tile[1] + 1)  # fmt: skip
    for i_m, i_n in product(rows, columns):
        yield Tile(task.name, rank, i_m, i_n)


def _type(task: Task) -> Type:
    assert task.type is not None
    return task.type
