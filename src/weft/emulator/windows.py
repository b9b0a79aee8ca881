"""Regular tiles of pointers as strided views of an allocation: data and shadow alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from weft.emulator.affine import AffinePointers, Box, bounds
from weft.emulator.memory import Allocation


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
    if allocation is None or 0 in steps and _repeats(steps, shape):
        return None
    offset = address - allocation.address
    if itemsize > 1 and offset % itemsize:
        return None
    if itemsize < allocation.cell_bytes:
        allocation.refine(itemsize)
    data = np.ndarray(shape, dtype, allocation.buffer, offset, steps)
    cell = allocation.cell_bytes
    first_cell = offset // cell * 4
    if itemsize == cell:
        cell_steps = tuple([step // cell * 4 for step in steps])
        shadow = np.ndarray(shape, np.int32, allocation.shadow, first_cell, cell_steps)
    else:
        factor = itemsize // cell
        cell_steps = (*[step // cell * 4 for step in steps], 4)
        shadow = np.ndarray((*shape, factor), np.int32, allocation.shadow, first_cell, cell_steps)
    return Window(allocation, data, shadow, address, inside)


def _repeats(steps: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return any(step == 0 and extent > 1 for step, extent in zip(steps, shape, strict=True))
