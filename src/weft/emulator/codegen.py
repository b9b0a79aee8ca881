"""TTIR as a Python function on numpy: a line per operation, the user's names kept.

Each function of a kernel is written by `function_writer.py`; here they become one module of Python,
with the names that they share: its functions, constants, places and variables.
"""

from __future__ import annotations

import builtins
import keyword
import linecache
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

from weft.base.errors import UnsupportedError
from weft.base.place import Place
from weft.emulator import numerics
from weft.emulator.affine import (
    AffinePointers,
    affine_tile,
    box_tile,
    fits_i32,
    index_overflow,
)
from weft.emulator.function_writer import FunctionWriter
from weft.emulator.inline_ptx import THREADS_OF_A_WARP, Assembly
from weft.emulator.tensor_memory import MatrixLayout, ScalesLayout
from weft.ir.ttir import Module
from weft.ir.ttir_parser import parse

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
LIBRARY |= {one.__name__: one for one in (MatrixLayout, ScalesLayout)}


class Namespace:
    """What the functions of one kernel share; `values` are the globals of its module."""

    def __init__(
        self, functions: Iterable[str], num_warps: int, layouts: Mapping[str, str]
    ) -> None:
        self.num_warps = num_warps
        self.layouts = layouts
        self.num_threads = THREADS_OF_A_WARP * num_warps
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

    def assembly(self, assembly: Assembly) -> str:
        """A global that holds `assembly`."""
        identifier = self.identifier("", ("assembly", assembly), "assembly")
        self.values[identifier] = assembly
        return identifier

    def location(self, place: Place) -> int:
        return self.places.setdefault(place, len(self.places))


def _short(symbol: str) -> str:
    """A function's own name from Triton's mangled one, `module.name__fp32_i32__...`."""
    match = re.match(r"(?:\w+\.)*(\w+?)__", symbol.removeprefix("__main__."))
    return match.group(1) if match else symbol


_numbers = count()


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel; `type` is TTIR's word, e.g. "!tt.ptr<f16>"."""

    name: str
    type: str


@dataclass(frozen=True, eq=False)
class EmulatedKernel:
    """A kernel as a Python function: `function(rt, *args)` runs one program.

    Pointers are int64 addresses, numbers numpy scalars, descriptors whatever the host made.
    `locations[i]` is the place behind the `loc=i` that `rt` is handed.
    """

    name: str
    function: Callable[..., None]
    parameters: tuple[Parameter, ...]
    locations: list[Place]
    source: str
    num_threads: int


@lru_cache(maxsize=1024)
def compile_ttir(text: str) -> EmulatedKernel:
    """The kernel in the TTIR `text` as a Python function; one text is compiled once.

    `rt.load` and `rt.store` are given AffinePointers and box masks where a tile is that regular
    (emulator/affine.py).

    Raises  UnsupportedError: an operation the emulator does not know, with the user's line
            CompileError: text that is not TTIR
    """
    return write_kernel(parse(text))


def write_kernel(module: Module) -> EmulatedKernel:
    """The kernel of a module, as one module of Python.

    Raises  UnsupportedError: an operation the emulator does not know, with the user's line
    """
    if module.num_ctas > 1:
        raise UnsupportedError(
            f"{module.kernel.name} is for clusters of {module.num_ctas} blocks, which the emulator"
            " does not run: launch it with num_ctas=1",
            place=module.kernel.place,
        )
    names = Namespace(module.functions, module.num_warps, module.layouts)
    functions = module.functions.values()
    source = "\n\n".join(FunctionWriter(names, function).text() for function in functions)
    kernel = module.kernel
    # A number that no other kernel gets: reports look up a line by this name.
    filename = f"<weft emulator: {kernel.name} {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    locations = names.values["LOCATIONS"] = list(names.places)
    exec(compile(source, filename, "exec"), names.values)
    run = names.values[names.functions[kernel.name]]
    # Wrapping integers and infinite floats are what the kernel means, not mistakes.
    return EmulatedKernel(
        kernel.name,
        np.errstate(all="ignore")(run),
        tuple(Parameter(value.name, value.type.text) for value in kernel.parameters),
        locations,
        source,
        names.num_threads,
    )
