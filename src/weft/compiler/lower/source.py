"""Core IR -> the source of a Python module, meant to be read: a kernel and its twin for Hopper.

    text(kernel)    the module's text: what it does and who signals whom, mapping, hooks, kernels
    load(kernel)    the same in a file of the cache, imported: Twins(plain, sm90)

The template stays what its author wrote (tiles/gemm.py, tiles/gemm_sm90.py); generated are its
hooks, each once for both. A hook that is one function of tiles/ is passed as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from weft.compiler.lower.heading import docstring, imports
from weft.compiler.lower.hooks import hooks, mapping, twins_of
from weft.compiler.lower.kernel_text import kernel_text
from weft.compiler.lower.loading import import_text
from weft.ir import core


class Twins(NamedTuple):
    """A kernel, and the same in Gluon for Hopper: JITFunctions. Rows have no other form there."""

    plain: Any
    sm90: Any


def load(kernel: core.Kernel, orders: Mapping[str, Any] | None = None) -> Twins:
    """The kernel's functions, from a file that is written once for each text.

    `orders` are the user's that it names: `@triton.jit` functions.
    """
    for seen in _watching:
        seen.setdefault(kernel)
    kernel = _instead.get(kernel, kernel)
    if not orders and kernel in _loaded:
        return _loaded[kernel]
    named = {one.name for one in kernel.of(core.Param) if one.sort == "order"}
    given = {name: one for name, one in (orders or {}).items() if name in named}
    module = import_text(kernel.name, text(kernel), given)
    twins = Twins(getattr(module, kernel.name), getattr(module, f"{kernel.name}_sm90", None))
    if not orders:
        _loaded[kernel] = twins
    return twins


# Operators ask at each call.
_loaded: dict[core.Kernel, Twins] = {}
_watching: list[dict[core.Kernel, None]] = []
_instead: dict[core.Kernel, core.Kernel] = {}


@contextmanager
def watched() -> Iterator[dict[core.Kernel, None]]:
    """Which kernels are loaded meanwhile, in order."""
    seen: dict[core.Kernel, None] = {}
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)


@contextmanager
def replaced(kernel: core.Kernel, by: core.Kernel) -> Iterator[None]:
    """Meanwhile another is loaded where this kernel is asked for: a mutant of it, say."""
    _instead[kernel] = by
    try:
        yield
    finally:
        del _instead[kernel]


@lru_cache(maxsize=64)
def text(kernel: core.Kernel) -> str:
    """The module's source. The kernel need not be legal: mutants are generated too."""
    functions = [*mapping(kernel), *hooks(kernel)]
    kernels = [kernel_text(kernel, twin) for twin in twins_of(kernel)]
    body = "\n\n\n".join([*functions, *kernels])
    return f"{docstring(kernel)}\n\n{imports(body)}\n\n\n{body}\n"
