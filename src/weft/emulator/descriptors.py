"""A program's accesses through tensor descriptors; its stores are asynchronous."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.emulator.memory import Allocation
from weft.emulator.plain_access import PlainAccess
from weft.emulator.transitions import Read, Write


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

    def _window(self, desc: Descriptor, indices) -> tuple[list[slice], tuple[int, ...], int]:
        """(slices of the block inside the tensor, its valid shape, first address)."""
        inside, shape, address = [], [], desc.base
        itemsize = desc.dtype.itemsize
        for index, size, stride, extent in zip(
            indices, desc.sizes, desc.strides, desc.block, strict=True
        ):
            start = int(index)
            lo, hi = max(start, 0), min(start + extent, size)
            inside.append(slice(lo - start, max(hi, lo) - start))
            shape.append(max(hi - lo, 0))
            address += lo * stride * itemsize
        return inside, tuple(shape), address

    def _strided(self, desc: Descriptor, shape, address: int, what: str, loc: int):
        """(allocation, data view, shadow view) of a window; None when it is out of bounds."""
        itemsize = desc.dtype.itemsize
        span = sum((n - 1) * s for n, s in zip(shape, desc.strides, strict=True)) * itemsize
        allocation = self._find(address, address + span + itemsize, loc)
        if allocation is None:
            beyond = self.memory.find(address)
            bad = address if beyond is None else beyond.end
            self._out_of_bounds(bad, itemsize, what, loc)
            return None
        if itemsize < allocation.cell_bytes:
            allocation.refine(itemsize)
        offset = address - allocation.address
        steps = tuple(s * itemsize for s in desc.strides)
        data = np.ndarray(shape, desc.dtype, allocation.buffer, offset, steps)
        cell_bytes = allocation.cell_bytes
        if itemsize == cell_bytes:
            shadow = np.ndarray(
                shape, np.int32, allocation.shadow, offset // cell_bytes * 4,
                tuple(s * 4 for s in desc.strides),
            )  # fmt: skip
        else:
            factor = itemsize // cell_bytes
            shadow = np.ndarray(
                (*shape, factor), np.int32, allocation.shadow, offset // cell_bytes * 4,
                (*(s * factor * 4 for s in desc.strides), 4),
            )  # fmt: skip
        return allocation, data, shadow

    def _first_cell(self, allocation: Allocation, address: int) -> np.ndarray:
        return np.array([(address - allocation.address) // allocation.cell_bytes])

    def descriptor_load(self, desc: Descriptor, indices, shape, loc):
        inside, valid, address = self._window(desc, indices)
        if 0 in valid:
            return self._padded(desc, desc.block).reshape(shape)
        found = self._strided(desc, valid, address, "reads", loc)
        if found is None:
            return self._padded(desc, desc.block).reshape(shape)
        allocation, data, shadow = found
        if self.machine.checks:
            cells = self._first_cell(allocation, address)
            self._touch(allocation, shadow, Read(self, allocation, loc, cells, shadow=shadow))
        if valid == desc.block:
            return data.reshape(shape) if shape != desc.block else data.copy()
        block = self._padded(desc, desc.block)
        block[tuple(inside)] = data
        return block.reshape(shape)

    def _padded(self, desc: Descriptor, shape) -> np.ndarray:
        if desc.padding == "nan":
            return np.full(shape, np.nan, desc.dtype)
        return np.zeros(shape, desc.dtype)

    def descriptor_store(self, desc: Descriptor, indices, value, loc):
        inside, valid, address = self._window(desc, indices)
        if 0 in valid:
            return
        found = self._strided(desc, valid, address, "writes", loc)
        if found is None:
            return
        allocation, data, shadow = found
        if self.machine.checks:
            cells = self._first_cell(allocation, address)
            segment = self.async_segment(loc)
            self._touch(allocation, shadow, Write(self, allocation, loc, cells, segment, shadow))
        data[...] = np.asarray(value).reshape(desc.block)[tuple(inside)]
