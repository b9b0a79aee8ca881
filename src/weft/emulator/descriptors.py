"""A program's accesses through tensor descriptors; its stores are asynchronous."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.emulator.affine import AffinePointers, Box
from weft.emulator.plain_access import PlainAccess


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor: base address, sizes and strides in elements, the block it moves."""

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    dtype: np.dtype
    padding: str = "zero"


class DescriptorAccess(PlainAccess):
    """Loads and stores of windows: strided views, so no addresses are computed per element."""

    def make_descriptor(self, base, sizes, strides, block_shape, dtype, padding, loc):
        return Descriptor(
            int(base), tuple(map(int, sizes)), tuple(map(int, strides)), tuple(block_shape),
            dtype, padding or "zero",
        )  # fmt: skip

    def _block(self, desc: Descriptor, indices) -> tuple[AffinePointers, Box]:
        """The block's pointers, and the part of it that lies inside the tensor."""
        start, steps, box = desc.base, [], []
        for index, size, stride, extent in zip(
            indices, desc.sizes, desc.strides, desc.block, strict=True
        ):
            first = int(index)
            step = stride * desc.dtype.itemsize
            start += first * step
            steps.append(step)
            box.append((max(-first, 0), min(max(size - first, 0), extent)))
        return AffinePointers(start, tuple(steps), desc.block), tuple(box)

    def descriptor_load(self, desc: Descriptor, indices, shape, loc):
        pointers, box = self._block(desc, indices)
        outside = np.nan if desc.padding == "nan" else 0
        return self.load(pointers, box, outside, desc.dtype, desc.block, loc).reshape(shape)

    def descriptor_store(self, desc: Descriptor, indices, value, loc):
        pointers, box = self._block(desc, indices)
        value = np.asarray(value).reshape(desc.block)
        segment = self.async_segment(loc)
        self._store(pointers, value, box, desc.dtype, desc.block, loc, segment)

    def descriptor_gather(self, desc: Descriptor, rows, column, shape, loc):
        pointers, inside = self._rows(desc, rows, column, shape)
        outside = np.nan if desc.padding == "nan" else 0
        return self.load(pointers, inside, outside, desc.dtype, shape, loc)

    def descriptor_scatter(self, desc: Descriptor, rows, column, value, loc):
        pointers, inside = self._rows(desc, rows, column, value.shape)
        segment = self.async_segment(loc)
        self._store(pointers, value, inside, desc.dtype, value.shape, loc, segment)

    def _rows(self, desc: Descriptor, rows, column, shape) -> tuple[np.ndarray, np.ndarray]:
        """Addresses of rows of a tensor of two axes, and which elements lie inside."""
        rows = rows.astype(np.int64)[:, None]
        columns = np.int64(column) + np.arange(shape[1])[None, :]
        (height, width), (row_step, column_step) = desc.sizes, desc.strides
        pointers = desc.base + (rows * row_step + columns * column_step) * desc.dtype.itemsize
        return pointers, (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
