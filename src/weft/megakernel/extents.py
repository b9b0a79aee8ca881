"""Tiles of tasks that nobody has settled: those with which an operation is predicted to end first.

    product = matmul(h, up, tile=(128, 128))    ->    product = matmul(h, up, tile=(16, 32, 256))

A tile is one task, so tiles also say how many workers an operation keeps busy. Of sixteen rows a
product reads its right operand and does little else: narrow tiles let all SMs read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import ceil

from weft.base.dtypes import DTYPES
from weft.base.hardware import H200X4, Hardware
from weft.compiler.cost.tasks import move_us, product_us, rounds_us
from weft.compiler.passes.tile import Region, held_by, tile
from weft.ir.kinds import GATED_PRODUCTS, WEIGHTED
from weft.ir.task import Program, Task
from weft.ir.tensor import Type
from weft.megakernel.sequences import OF_KEYS
from weft.megakernel.tiles import IN_PLACE, refuse

# Extents of products: below 32 columns rows of B would be read in less than a sector of 64 bytes.
ROWS, COLUMNS = (128, 64, 32, 16), (128, 64, 32)
# What one step over k may hold of both operands, in bytes, and its extents.
STEP_BYTES, LEAST_K, MOST_K = 1 << 15, 32, 256
# Elements of a tile of all else, which lies in registers.
MOST_ELEMENTS = 1 << 13
WIDTHS = (1024, 512, 256, 128)
# Their tiles are a sequence, or a head of it.
OF_SEQUENCES = (*IN_PLACE, *OF_KEYS, "merge_parts")


def chosen(
    program: Program, sizes: Mapping[str, int], num_ranks: int, num_workers: int,
    settled: Collection[str] = (), machine: Hardware = H200X4,
) -> Program:  # fmt: skip
    """The tiled program with other tiles, but for those of the tasks `settled`.

    Raises  UsageError, UnsupportedError: what no tasks are made of, at the user's line
    """
    refuse(program, sizes, num_ranks)

    def held(name: str) -> Region:
        kind = program.task(name).type
        assert kind is not None
        return held_by(kind, 0, sizes, num_ranks)

    found = {
        task.name: _tile(task, program, held, num_workers, machine)
        for task in program.tasks
        if task.kind not in ("input", *OF_SEQUENCES) and task.name not in settled
    }
    return tile(program, found)


def _tile(task: Task, program: Program, held, num_workers: int, machine: Hardware) -> tuple:
    # What a rank gathers it has as an operand, what it sums over ranks it makes.
    made = held(task.operands[0] if task.kind == "all_gather" else task.name)
    rows, columns = (max(1, extent) for extent in made.extents)
    kind = task.type
    assert isinstance(kind, Type)
    itemsize = DTYPES[kind.dtype].itemsize

    def tiles_of(cut: tuple[int, int]) -> int:
        return ceil(rows / cut[0]) * ceil(columns / cut[1])

    if task.kind in WEIGHTED:
        k = held(task.operands[0]).extents[1]
        times = 2 if task.kind in GATED_PRODUCTS else 1
        columns *= times

        def multiply(cut: tuple[int, int]) -> float:
            each = product_us(*cut, k, itemsize, ceil(rows / cut[0]), machine)
            return rounds_us(each, tiles_of(cut), num_workers, machine)

        cut = min(_pairs(rows, columns, ROWS, COLUMNS), key=multiply)
        return (cut[0], cut[1] // times, _step(cut, k, itemsize))

    def move(cut: tuple[int, int]) -> float:
        cells = cut[0] * cut[1] * (len(task.operands) + 1)
        return rounds_us(move_us(cells * itemsize, machine), tiles_of(cut), num_workers, machine)

    heights, widths = ROWS, WIDTHS
    if task.kind == "rms_norm":
        # Each tile needs the whole row: it is read once where that is all of a tile, not for each
        # of several, step after step.
        heights, widths = (*ROWS, 8, 4, 2, 1), (_power_of_2(columns),)
    pairs = [*_pairs(rows, columns, heights, widths)]
    return min((cut for cut in pairs if cut[0] * cut[1] <= MOST_ELEMENTS), key=move)


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
