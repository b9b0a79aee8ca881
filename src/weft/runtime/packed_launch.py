"""A launch of a binary whose arguments are packed once; at each call addresses are put in.

No Triton: how its launcher hands arguments over, descriptors among them, is said here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.runtime.backends.modules import NUMBERS, SCRATCH, Descriptor, Modules

# Descriptors of an argument that are kept, by address.
KEPT_DESCRIPTORS = 16
# A place and a distance from it.
Find = Callable[[Sequence[Any]], tuple[int, int]]


class Launch:
    """One launch with its arguments packed, but for the addresses of a call."""

    def __init__(
        self, driver: Modules, kernel: Any, grid: Sequence[int], words: Sequence[Any],
        find: Find, device: Any,
    ) -> None:  # fmt: skip
        self._driver, self._binary, self._grid = driver, kernel.binary, grid
        self._function = driver.function(kernel.binary, device)
        self._packed: list[Any] = []
        # Numbers of words that are addresses, and each one's place and distance.
        self._at: list[int] = []
        self._pointers: list[tuple[int, int]] = []
        self._maps: list[tuple[int, Descriptor, int, int, dict[int, Any]]] = []
        described = iter(kernel.descriptors or ())
        for kind, *value in words:
            if kind == "descriptor":
                self._describe(next(described, None), find, *value)
            elif kind.startswith("*"):
                self._point(find(value[0]))
            else:
                self._packed.append(NUMBERS[kind](value[0]))
        self._packed += [ctypes.c_uint64(0) for _ in range(SCRATCH)]
        self._places = (ctypes.c_void_p * len(self._packed))(*map(ctypes.addressof, self._packed))
        # Side by side: a call writes all of them at once.
        self._addresses = (ctypes.c_uint64 * len(self._at))()
        for i, number in enumerate(self._at):
            self._places[number] = ctypes.addressof(self._addresses) + 8 * i

    def _point(self, where: tuple[int, int]) -> None:
        self._at.append(len(self._packed))
        self._packed.append(ctypes.c_uint64(0))
        self._pointers.append(where)

    def _describe(
        self, told: Mapping[str, Any] | None, find: Find, at: Sequence[Any], shape: Sequence[int],
        strides: Sequence[int], fills_with_nan: bool, dtype: str,
    ) -> None:  # fmt: skip
        """As Triton's launcher takes a descriptor apart: the tensor map, or where the kernel was
        compiled without TMA the address with all that a map says; then shape and strides."""
        if told is None:
            self._point(find(at))
            self._packed += [ctypes.c_int64(one) for one in (*shape, *strides)]
            self._packed.append(ctypes.c_int8(fills_with_nan))
        else:
            one = Descriptor(
                tuple(shape), tuple(strides), tuple(told["block_size"]),
                MAP_KINDS.get(told["elem_type"], told["elem_type"]), told["elem_size"],
                told["swizzle"], fills_with_nan,
            )  # fmt: skip
            self._maps.append((len(self._packed), one, *find(at), {}))
            self._packed.append(ctypes.c_uint64(0))  # in whose place the map will be
        self._packed += [ctypes.c_int32(one) for one in shape]
        self._packed += [ctypes.c_int64(one) for one in strides]

    def __call__(self, places: Sequence[int], stream: int) -> None:
        self._addresses[:] = [places[place] + distance for place, distance in self._pointers]
        for number, descriptor, place, distance, kept in self._maps:
            address = places[place] + distance
            found = kept.get(address)
            if found is None:
                if len(kept) >= KEPT_DESCRIPTORS:
                    kept.clear()
                found = kept[address] = self._driver.encode(descriptor, address)
            self._places[number] = ctypes.addressof(found)
        self._driver.launch(self._binary, self._function, self._grid, self._places, stream)


# Triton's numbers of elements' types that are others of CUtensorMapDataType.
MAP_KINDS = {8: 10, 9: 8, 10: 9}
