"""A driver's library with no device: what is loaded, encoded and launched through it is kept.

Values are read as they are at the launch: each argument's first eight bytes, and of a tensor map
what it was encoded with.
"""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

from weft.runtime.backends.modules import DRIVERS, Modules

# Of each rank's thread, what takes its launches.
NOW = threading.local()


class Library:
    """As ctypes gives the driver's."""

    def __init__(self, backend: str) -> None:
        self.loaded: list[bytes] = []
        self.functions: list[tuple[int, str]] = []
        self.maps: list[tuple] = []
        self._lock = threading.Lock()
        names = DRIVERS[backend]
        for name in ("load", "function", "attribute", "launch", "cooperative", "encode"):
            if getattr(names, name):
                # Of an object whose attributes can be set, as ctypes' can.
                act = getattr(self, f"_{name}")
                setattr(self, getattr(names, name), lambda *args, act=act: act(*args) or 0)

    def _load(self, module: Any, code: bytes) -> None:
        self.loaded.append(code)
        module._obj.value = len(self.loaded)

    def _function(self, function: Any, module: Any, name: bytes) -> None:
        assert name in self.loaded[module.value - 1]  # of an ELF's symbols
        self.functions.append((module.value, name.decode()))
        function._obj.value = len(self.functions)

    def _attribute(self, *args: Any) -> None:
        pass

    def _encode(
        self, found: Any, kind: Any, rank: Any, address: Any, shape: Any, strides: Any, block: Any,
        steps: Any, interleave: Any, swizzle: Any, promotion: Any, fill: Any,
    ) -> None:  # fmt: skip
        assert ctypes.addressof(found._obj) % 64 == 0 and [*steps] == [1] * rank.value
        told = (address.value, tuple(shape)[::-1], tuple(strides)[::-1][1:], tuple(block)[::-1],
                kind.value, swizzle.value, fill.value)  # fmt: skip
        with self._lock:
            self.maps.append(told)
            number = len(self.maps) - 1
        ctypes.c_uint64.from_buffer(found._obj).value = number

    def _launch(self, function: int, *what: Any) -> None:
        *grid, threads, one, other, shared, stream, places, extra = what
        assert (one, other, extra) == (1, 1, None)
        self._keep(function, grid, threads, shared, stream, places, False)

    def _cooperative(self, function: int, *what: Any) -> None:
        *grid, threads, _, _, shared, stream, places = what
        self._keep(function, grid, threads, shared, stream, places, True)

    def _keep(self, function: int, grid: Any, threads: int, shared: int, stream: int, places: Any,
              is_cooperative: bool) -> None:  # fmt: skip
        words = [ctypes.string_at(place, 8) for place in places]
        launch = SimpleNamespace(
            function=self.functions[function - 1][1], grid=tuple(grid), threads=threads,
            shared=shared, words=words, is_cooperative=is_cooperative, library=self,
        )  # fmt: skip
        NOW.log.append(("launch", launch, stream))


def modules(backend: str) -> Modules:
    return Modules(backend, Library(backend))
