"""The tensor memory of a block, of sm_100: 128 lanes of 32-bit columns, and views of it.

A view knows where its elements lie, so that others may be laid over the same columns. A matrix
takes blocks of `block_m` x `block_n` elements; those of 64 rows lie in each fourth of the lanes, in
16 of its 32. See Triton's `tensorMemoryToLinearLayout` and PTX's "tcgen05 data path layout".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.emulator.affine import AffinePointers, Window, find_window
from weft.emulator.memory import Allocation

LANES = 128
COLUMN_BYTES = 4

Axes = tuple[tuple[int, int], ...]  # (extent, step in bytes), the slowest first


class MatrixLayout(NamedTuple):
    """Gluon's `TensorMemoryLayout`; a column of elements is `col_stride` elements wide."""

    block_m: int
    block_n: int
    col_stride: int = 1

    def axes(self, rows: int, columns: int, itemsize: int, lane_bytes: int) -> tuple[Axes, Axes]:
        """Where rows and columns lie; the rest of a matrix lies behind its first block."""
        width, unit = min(self.block_n, columns), itemsize * self.col_stride
        block_bytes = width * unit
        # Of blocks of 64 rows two share their lanes: neighbours by rows, or else by columns.
        across = self.block_m == 64 and rows == 64 and columns > width
        down = self.block_m == 64 and rows > 64
        num_down = rows // (self.block_m << down)
        num_across = columns // (width << across)
        half = ((2, 16 * lane_bytes),)
        if self.block_m == 64:
            lanes: Axes = ((4, 32 * lane_bytes), (16, lane_bytes))
        else:
            lanes = ((LANES, lane_bytes),)
        down_axes = ((num_down, block_bytes), *(half if down else ()), *lanes)
        across_axes = (
            (num_across, num_down * block_bytes), *(half if across else ()), (width, unit)
        )  # fmt: skip
        return down_axes, across_axes


class ScalesLayout(NamedTuple):
    """Gluon's `TensorMemoryScalesLayout`: chunks of 32 rows and 4 columns, of which all four
    warps have a copy; the first one's is kept."""

    def axes(self, rows: int, columns: int, itemsize: int, lane_bytes: int) -> tuple[Axes, Axes]:
        chunks, low = -(-rows // 32), min(columns, 4)
        along = ((chunks, 4 * itemsize), (min(rows, 32), lane_bytes))
        return along, ((columns // low, 4 * itemsize * chunks), (low, itemsize))


class TensorMemory(Allocation):
    """What one allocate_tensor_memory gives a program; nothing has been written at first."""

    __slots__ = ("array",)

    def __init__(self, columns: int, dtype: np.dtype, rank: int, name: str) -> None:
        self.array = np.full((LANES, columns * COLUMN_BYTES), 0xFF, np.uint8)
        super().__init__(
            self.array.ctypes.data, self.array.nbytes, dtype.itemsize, rank, name,
            heap_offset=None, heap=None, initialised=False,
            shape=(LANES, columns * COLUMN_BYTES // dtype.itemsize),
        )  # fmt: skip

    def refine(self, itemsize: int) -> None:
        super().refine(itemsize)
        self.shape = (LANES, self.array.shape[1] // itemsize)


class TensorView(NamedTuple):
    """A memory descriptor: elements of tensor memory from byte `start` of each lane on."""

    memory: TensorMemory
    dtype: np.dtype
    start: int
    slots: Axes
    rows: Axes
    columns: Axes

    @classmethod
    def over(
        cls, memory: TensorMemory, start: int, shape: tuple[int, ...], dtype: np.dtype,
        layout: MatrixLayout | ScalesLayout,
    ) -> TensorView:  # fmt: skip
        """Elements of `shape` as `layout` lays them, from `start` on."""
        lane_bytes = memory.array.shape[1]
        rows, columns = layout.axes(*shape[-2:], dtype.itemsize, lane_bytes)
        slot_bytes = num_columns(shape[-2:], dtype, layout) * COLUMN_BYTES
        slots = tuple((extent, slot_bytes) for extent in shape[:-2])
        return cls(memory, dtype, start, slots, rows, columns)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*(extent for extent, _ in self.slots), _extent(self.rows), _extent(self.columns))

    def window(self) -> Window | None:
        """Its cells, in more axes than `shape` has; None where they are not all there."""
        axes = (*self.slots, *self.rows, *self.columns)
        pointers = AffinePointers(
            self.memory.address + self.start,
            tuple(step for _, step in axes),
            tuple(extent for extent, _ in axes),
        )
        memory = self.memory

        def find(low: int, end: int, _: int) -> Allocation | None:
            return memory if memory.address <= low and end <= memory.end else None

        return find_window(find, pointers, None, self.dtype, 0)

    @property
    def values(self) -> np.ndarray:
        """A copy of what is there."""
        window = self.window()
        assert window is not None
        return window.data.copy().reshape(self.shape)

    def put(self, values: np.ndarray) -> None:
        window = self.window()
        assert window is not None
        window.data[...] = np.broadcast_to(values, self.shape).reshape(window.data.shape)

    def part(self, slot: int) -> TensorView:
        (_, step), *rest = self.slots
        return self._replace(start=self.start + slot * step, slots=tuple(rest))

    def slice(self, first: int, extent: int) -> TensorView | None:
        """`extent` columns from `first` on; None where they lie in no even steps."""
        found = _cut(self.columns, first, extent)
        if found is None:
            return None
        return self._replace(start=self.start + found[0], columns=found[1])


def num_columns(
    shape: tuple[int, ...], dtype: np.dtype, layout: MatrixLayout | ScalesLayout
) -> int:
    """How many 32-bit columns elements of `shape` take."""
    rows, columns = layout.axes(*shape[-2:], dtype.itemsize, 1 << 32)
    within = [axis for axis in (*rows, *columns) if axis[1] < 1 << 32]
    last = sum((extent - 1) * step for extent, step in within)
    unit = dtype.itemsize * getattr(layout, "col_stride", 1)
    slots = int(np.prod(shape[:-2], dtype=int))
    return slots * -(-(last + unit) // COLUMN_BYTES)


def _extent(axes: Axes) -> int:
    return int(np.prod([extent for extent, _ in axes]))


def _cut(axes: Axes, first: int, extent: int) -> tuple[int, Axes] | None:
    """The offset and the axes of the elements first .. first + extent - 1."""
    (_, step), *rest = axes
    if not rest:
        return first * step, ((extent, step),)
    inner = _extent(tuple(rest))
    if first % inner == 0 and extent % inner == 0:
        return first // inner * step, ((extent // inner, step), *rest)
    if first // inner != (first + extent - 1) // inner:
        return None
    found = _cut(tuple(rest), first % inner, extent)
    return None if found is None else (found[0] + first // inner * step, found[1])
