"""Tiles of tasks that nobody has settled: those with which an operation is predicted to end first.

    product = matmul(h, up, tile=(128, 128))    ->    product = matmul(h, up, tile=(16, 32, 256))

A tile is one task, so tiles also say how many workers an operation keeps busy. Of sixteen rows a
product reads its right operand and does little else: narrow tiles let all SMs read. So do parts
along k, which also let them have equal shares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil
from typing import NamedTuple

from weft.base.dtypes import DTYPES
from weft.base.hardware import H200X4, Hardware
from weft.compiler.cost.tasks import move_us, product_us, rounds_us
from weft.compiler.passes.tile import held_by, tile
from weft.ir.kinds import GATED_PRODUCTS, WEIGHTED
from weft.ir.task import Program, Task
from weft.ir.tensor import Type
from weft.megakernel.memory import PARTS
from weft.megakernel.sequences import OF_KEYS
from weft.megakernel.tiles import IN_PLACE, SUMMED, may_be_split, refuse

# Extents of products: below 32 columns rows of B would be read in less than a sector of 64 bytes.
ROWS, COLUMNS = (128, 64, 32, 16), (128, 64, 32)
# What one step over k may hold of both operands, in bytes, and its extents.
STEP_BYTES, LEAST_K, MOST_K = 1 << 15, 32, 256
# Parts along k of a product, at most: whoever reads it has a load of each in flight.
MOST_PARTS, PART_BYTES = 8, DTYPES[PARTS].itemsize
# Elements of a tile of all else, which lies in registers.
MOST_ELEMENTS = 1 << 13
WIDTHS = (1024, 512, 256, 128)
# Extents of what reads much of each row.
FEW_ROWS = (8, 4, 2, 1)
# Their tiles are a sequence, or a head of it.
OF_SEQUENCES = (*IN_PLACE, *OF_KEYS, "merge_parts")


class Split(NamedTuple):
    """How products are cut: rows, columns, a step over k, and in how many parts along k."""

    tile: tuple[int, int, int]
    split_k: int


def chosen(
    program: Program, sizes: Mapping[str, int], num_ranks: int, num_workers: int,
    settled: Collection[str] = (), machine: Hardware = H200X4, split_k: int = 1,
) -> Program:  # fmt: skip
    """The tiled program with other tiles, but for those of the tasks `settled`. Products that few
    tiles would be made of are split along k.

    Shapes  split_k: parts of each product that can be split; 0: as many as are predicted to be
            done first

    Raises  UsageError, UnsupportedError: what no tasks are made of, at the user's line
    """
    refuse(program, sizes, num_ranks)
    chooser = Chooser(program, sizes, num_ranks, num_workers, frozenset(settled), machine)
    ours = [one for one in program.tasks if one.kind != "input" and one.name not in settled]
    found: dict[str, tuple[int, ...]] = {}
    splits: dict[str, int] = {}
    for task in ours:
        if task.kind in WEIGHTED:
            found[task.name], splits[task.name] = chooser.product(task, split_k)
    for task in ours:
        if task.kind not in (*WEIGHTED, *OF_SEQUENCES):
            most = max((splits.get(name, 1) for name in task.operands), default=1)
            found[task.name] = chooser.others(task, most)[1]
    tiled = tile(program, found)
    tasks = (replace(one, split_k=splits.get(one.name, one.split_k)) for one in tiled.tasks)
    return replace(tiled, tasks=tuple(tasks))


@dataclass(frozen=True)
class Chooser:
    """Of each task of a program the tile that is predicted to be done first, and when."""

    program: Program
    sizes: Mapping[str, int]
    num_ranks: int
    num_workers: int
    settled: frozenset[str]
    machine: Hardware

    @cached_property
    def by_name(self) -> dict[str, Task]:
        return {task.name: task for task in self.program.tasks}

    @cached_property
    def may_be_split(self) -> dict[str, list[Task]]:
        """The products that can be split along k, by what they multiply from the left."""
        found: dict[str, list[Task]] = {}
        for one in self.program.tasks:
            if one.name not in self.settled and may_be_split(self.program, one):
                found.setdefault(one.operands[0], []).append(one)
        return found

    def held(self, name: str) -> tuple[int, int]:
        """Extents of what rank 0 has of a value."""
        kind = self.by_name[name].type
        assert kind is not None
        rows, columns = held_by(kind, 0, self.sizes, self.num_ranks).extents
        return max(1, rows), max(1, columns)

    def itemsize(self, task: Task) -> int:
        assert isinstance(task.type, Type)
        return DTYPES[task.type.dtype].itemsize

    def product(self, task: Task, split_k: int) -> Split:
        """Of a product; and where it may be split, of all that may be and have the same rows on the
        left: workers that one leaves idle do tasks of another."""
        rows, k = self.held(task.name)[0], self.held(task.operands[0])[1]
        times = 2 if task.kind in GATED_PRODUCTS else 1
        beside = self.may_be_split.get(task.operands[0], [])
        splits = [split_k] if split_k else [*range(1, MOST_PARTS + 1)]
        if split_k == 1 or task not in beside:
            beside, splits = [task], [1]
        columns = [times * self.held(one.name)[1] for one in beside]
        itemsize = self.itemsize(task)
        adding_us = cache(lambda split: self._adding_us(beside, split))

        def took(split: Split) -> float:
            height, width, step = split.tile
            own = min(k, ceil(ceil(k / step) / split.split_k) * step)
            each = product_us((height, width), own, rows, itemsize, self.machine)
            tiles = sum(ceil(rows / height) * ceil(one / width) for one in columns)
            us = 0.0
            if split.split_k > 1:
                cells = min(rows, height) * width
                each += move_us(PART_BYTES * cells, self.machine) - self.machine.task_us
                us += adding_us(split.split_k)
            tasks = tiles * split.split_k
            return us + rounds_us(each, tasks, self.num_workers, self.machine)

        found = [
            # No part is without a step.
            Split((*cut, step), ceil(steps / ceil(steps / split)))
            for cut in _pairs(rows, max(columns), ROWS, COLUMNS)
            for split in splits
            for step in [_step(cut, ceil(k / split), itemsize)]
            for steps in [max(1, ceil(k / step))]
        ]  # fmt: skip
        (height, width, step), split = min(found, key=took)
        return Split((height, width // times, step), split)

    def _adding_us(self, products: Collection[Task], split_k: int) -> float:
        """What adding up parts costs the tasks that read the products, at most."""
        users = [
            user for one in products for user in self.program.users(one.name)
            if user.kind not in OF_SEQUENCES
        ]  # fmt: skip
        more = (self.others(user, split_k)[0] - self.others(user, 1)[0] for user in users)
        return max([0.0, *more])

    def others(self, task: Task, parts: int) -> tuple[float, tuple[int, int]]:
        """Of all else: us, and the tile; one of its operands comes in so many parts along k."""
        # What a rank gathers it has as an operand, what it sums over ranks it makes.
        rows, columns = self.held(task.operands[0] if task.kind == "all_gather" else task.name)
        itemsize = self.itemsize(task)
        heights, widths = ROWS, WIDTHS
        if task.kind == "rms_norm":
            # Each tile needs the whole row: it is read once where that is all of a tile, not for
            # each of several, step after step.
            heights, widths = (*ROWS, *FEW_ROWS), (_power_of_2(columns),)
        of_parts = 0
        if parts > 1:
            heights = (*ROWS, *FEW_ROWS)
            of_parts = parts * PART_BYTES * (self.num_ranks if task.kind in SUMMED else 1)

        def took(cut: tuple[int, int]) -> float:
            cells = (len(task.operands) + 1) * itemsize + of_parts
            num_bytes = cells * cut[0] * cut[1]
            tiles = ceil(rows / cut[0]) * ceil(columns / cut[1])
            return rounds_us(move_us(num_bytes, self.machine), tiles, self.num_workers,
                             self.machine)  # fmt: skip

        pairs = _pairs(rows, columns, heights, widths)
        found = min((cut for cut in pairs if cut[0] * cut[1] <= MOST_ELEMENTS), key=took)
        return took(found), found


def _pairs(
    rows: int, columns: int, heights: Collection[int], widths: Collection[int]
) -> Iterator[tuple[int, int]]:
    """Extents that are not twice what there is, but for the least; the largest first."""
    for height in heights:
        for width in widths:
            is_high = height >= 2 * rows and height > min(heights)
            is_wide = width >= 2 * columns and width > min(widths)
            if not (is_high or is_wide):
                yield height, width


def _power_of_2(columns: int) -> int:
    return min(MOST_ELEMENTS, max(WIDTHS[-1], 1 << (columns - 1).bit_length()))


def _step(cut: tuple[int, int], k: int, itemsize: int) -> int:
    """How far a step over k goes: both operands' parts fit where several steps are in flight."""
    most = min(MOST_K, STEP_BYTES // itemsize // sum(cut), max(LEAST_K, 2 * k - 1))
    return 1 << max(LEAST_K, most).bit_length() - 1
