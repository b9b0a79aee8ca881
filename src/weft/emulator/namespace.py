"""The names of one kernel's module of Python: its functions, constants, places and variables."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from weft.base.place import Place
from weft.emulator import numerics
from weft.emulator.affine import (
    AffinePointers,
    affine_tile,
    box_tile,
    fits_i32,
    index_overflow,
)

# What generated code may call; everything else it names is its own.
LIBRARY: dict[str, Any] = {
    name: value
    for name, value in vars(numerics).items()
    if not name.startswith("__")
    and (isinstance(value, np.dtype) or getattr(value, "__module__", "") == numerics.__name__)
}
LIBRARY |= {name: dtype for name, dtype in numerics.DTYPES.items() if name != "ptr"}
LIBRARY |= {"np": np, "LOCATIONS": (), "AffinePointers": AffinePointers}
LIBRARY |= {f.__name__: f for f in (affine_tile, box_tile, fits_i32, index_overflow)}


class Namespace:
    """What the functions of one kernel share; `values` are the globals of its module.

    With `affine` tiles of pointers may stay in their form as integers (emulator/affine.py).
    """

    def __init__(self, functions: Iterable[str], affine: bool) -> None:
        self.affine = affine
        self.values: dict[str, Any] = dict(LIBRARY)
        self.constants: dict[Any, str] = {}
        self.places: dict[Place, int] = {}
        self._taken: dict[str, dict[str, Any]] = {}
        self.functions = {
            name: self.identifier("", ("function", name), _short(name)) for name in functions
        }

    def identifier(self, owner: str, key: Any, name: str) -> str:
        """A Python name for `key`, as like `name` as may be.

        `owner` is the function it is local to, "" for a global: locals of one function may be
        called as those of another, but not as a global.
        """
        name = re.sub(r"\W", "_", name)
        if not name or name[0].isdigit() or keyword.iskeyword(name) or name == "rt":
            name = f"_{name}"
        while name in LIBRARY or hasattr(builtins, name) or self._is_taken(owner, key, name):
            name += "_"
        self._taken.setdefault(name, {})[owner] = key
        return name

    def _is_taken(self, owner: str, key: Any, name: str) -> bool:
        owners = self._taken.get(name, {})
        if owner in owners:
            return owners[owner] != key
        return bool(owners) if owner == "" else "" in owners

    def constant(self, value: Any, name: str) -> str:
        """A global that holds `value`."""
        array = np.asarray(value)
        key = (array.dtype, array.shape, array.tobytes())
        if key not in self.constants:
            if array.ndim:
                array = np.ascontiguousarray(array)
                array.flags.writeable = False
                value = array
            identifier = self.identifier("", ("constant", key), name)
            self.values[identifier] = value
            self.constants[key] = identifier
        return self.constants[key]

    def location(self, place: Place) -> int:
        return self.places.setdefault(place, len(self.places))


def _short(symbol: str) -> str:
    """A function's own name from Triton's mangled one, `module.name__fp32_i32__...`."""
    match = re.match(r"(?:\w+\.)*(\w+?)__", symbol.removeprefix("__main__."))
    return match.group(1) if match else symbol
