"""TTIR as a Python function on numpy: a line per operation, the user's names kept.

Each function of a kernel is written by `function_writer.py`; here they become one module of Python,
with the names that they share (`namespace.py`).
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np

from weft.base.place import Place
from weft.emulator.function_writer import FunctionWriter
from weft.emulator.namespace import Namespace
from weft.emulator.ttir import Module
from weft.emulator.ttir_parser import parse

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


@lru_cache(maxsize=1024)
def compile_ttir(text: str, affine: bool = False) -> EmulatedKernel:
    """The kernel in the TTIR `text` as a Python function; one text is compiled once.

    With `affine`, `rt.load` and `rt.store` are given AffinePointers and box masks where a tile is
    that regular (see emulator/affine.py); without, always arrays.

    Raises  UnsupportedError: an operation the emulator does not know, with the user's line
            CompileError: text that is not TTIR
    """
    return write_kernel(parse(text), affine)


def write_kernel(
    module: Module, affine: bool, writer: type[FunctionWriter] = FunctionWriter
) -> EmulatedKernel:
    """The kernel of a module, as one module of Python."""
    names = Namespace(module.functions, affine)
    source = "\n\n".join(writer(names, function).text() for function in module.functions.values())
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
    )
