"""Tiles of pointers that are a start and a step per axis, and masks that are boxes.

Almost every tile a kernel loads is `base + rows * stride + columns` under `rows < m` and
`columns < n`. Kept as a handful of integers it costs nothing to compute, and memory sees a strided
window, of data and shadow alike, instead of a thousand addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from weft.base.errors import OutOfBoundsError
from weft.base.place import Place
from weft.emulator.memory import Allocation

# A mask that is a box: (first, behind the last) along each axis.
Box = tuple[tuple[int, int], ...]


class AffinePointers:
    """The addresses start + sum of index * step over the axes of `shape`, steps in bytes."""

    __slots__ = ("shape", "start", "steps")

    def __init__(self, start: int, steps: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self.start = start
        self.steps = steps
        self.shape = shape

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return affine_tile(self.start, self.steps, self.shape, np.dtype(dtype or np.int64))

    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest address."""
        return bounds(self.start, zip(self.steps, self.shape, strict=True))


def bounds(start: int, axes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The least and the largest of start + sum of index * step, for (step, extent) of each axis."""
    low = high = start
    for step, extent in axes:
        if step < 0:
            low += step * (extent - 1)
        else:
            high += step * (extent - 1)
    return low, high


def affine_tile(
    start: int, steps: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """start + sum of index * step, in full; wraps to `dtype`."""
    total = np.array(start, np.int64)
    for axis, (step, extent) in enumerate(zip(steps, shape, strict=True)):
        if step:
            along = [1] * len(shape)
            along[axis] = extent
            total = total + (np.arange(extent) * step).reshape(along)
    return np.broadcast_to(total, shape).astype(dtype)


def box_tile(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    """The mask in full."""
    mask = np.zeros(shape, bool)
    mask[tuple(slice(first, end) for first, end in box)] = True
    return mask


def fits_i32(start: int, axes: tuple[tuple[int, int], ...]) -> bool:
    """Do start + sum of index * step stay within 32 bits, for (step, extent) of each axis?"""
    low, high = bounds(start, axes)
    return low >= -(1 << 31) and high < 1 << 31


def index_overflow(place: Place) -> None:
    """Stop: an index that has wrapped around 32 bits is about to become an address or a mask."""
    raise OutOfBoundsError(
        "index arithmetic overflows 32 bits here, so the index has wrapped around; "
        "widen it first, as in i.to(tl.int64) * stride",
        place=place,
    )


class Window(NamedTuple):
    """What a tile of pointers looks at: views of the elements that its mask leaves.

    `inside` cuts those elements out of a whole tile; None is all of it.
    """

    allocation: Allocation
    data: np.ndarray
    shadow: np.ndarray
    address: int
    inside: tuple[slice, ...] | None

    def first_cell(self) -> np.ndarray:
        """The shadow cell of the first element, as the array that accesses take."""
        return np.array([(self.address - self.allocation.address) // self.allocation.cell_bytes])

    def span(self) -> tuple[int, int]:
        """(offset of the first byte in the allocation, number of bytes to the last)."""
        low, high = bounds(self.address, zip(self.data.strides, self.data.shape, strict=True))
        return low - self.allocation.address, high - low + self.data.itemsize


def find_window(
    find: Callable[[int, int, int], Allocation | None], pointers: AffinePointers, box: Box | None,
    dtype: np.dtype, loc: int,
) -> Window | None:  # fmt: skip
    """The window of `pointers` under `box`; None where it is not one (several allocations, out of
    bounds, misaligned, empty, or elements that repeat).

    `find(low, end, loc)` is the one allocation that holds these addresses, if there is one.
    """
    address, steps, shape = pointers.start, pointers.steps, pointers.shape
    inside = None
    if box is not None:
        valid = []
        for (first, end), step, extent in zip(box, steps, shape, strict=True):
            if end <= first:
                return None
            if first or end < extent:
                inside = inside or ()
            address += first * step
            valid.append(end - first)
        if inside is not None:
            inside = tuple([slice(first, end) for first, end in box])
            shape = tuple(valid)
    low, high = bounds(address, zip(steps, shape, strict=True))
    itemsize = dtype.itemsize
    allocation = find(low, high + itemsize, loc)
    if (
        allocation is None
        or 0 in steps
        and any(n > 1 for step, n in zip(steps, shape, strict=True) if step == 0)
    ):
        return None
    offset = address - allocation.address
    if itemsize > 1 and offset % itemsize:
        return None
    if itemsize < allocation.cell_bytes:
        allocation.refine(itemsize)
    data = np.ndarray(shape, dtype, allocation.buffer, offset, steps)
    return Window(allocation, data, shadow_of(allocation, data, offset), address, inside)


def shadow_of(allocation: Allocation, data: np.ndarray, offset: int) -> np.ndarray:
    """The cells of elements that begin `offset` bytes behind the allocation; with an axis more
    where an element has several."""
    cell = allocation.cell_bytes
    first_cell = offset // cell * 4
    cell_steps = tuple([step // cell * 4 for step in data.strides])
    shadow = allocation.shadow
    if data.itemsize == cell:
        return np.ndarray(data.shape, np.int32, shadow, first_cell, cell_steps)
    shape = (*data.shape, data.itemsize // cell)
    return np.ndarray(shape, np.int32, shadow, first_cell, (*cell_steps, 4))
