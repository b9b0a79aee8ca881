"""How launches specialise a kernel: what a GPU's launch would compile, as a record.

Of Triton: `JITFunction.run`; the binder that a launch makes of a kernel's signature and a backend;
a kernel's parameters; the `fn` of what wraps a kernel (autotuning, heuristics).
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from weft.base.records import KernelRecord
from weft.language.triton_api.tracing import unwrap

JITFunction = triton.runtime.jit.JITFunction
# Types and alignment are the same for all GPUs.
BINDER_TARGET = GPUTarget("cuda", 90, 32)
# Of what a launch is called with, what is no option of the compiler.
OF_LAUNCHES = ("grid", "warmup", "debug", "instrumentation_mode")


@contextmanager
def recorded_launches(take: Callable[[Any, Callable[[], KernelRecord]], None]) -> Iterator[None]:
    """Hand every kernel that is launched in the brackets to `take`, before it is launched.

    With it comes a function that makes the record of what this launch would compile on a GPU.
    """
    launch = JITFunction.run
    lock = threading.Lock()

    def recorded(fn: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not warmup:
            with lock:
                take(fn, lambda: launch_record(fn, args, options))
        return launch(fn, *args, grid=grid, warmup=warmup, **options)

    JITFunction.run = recorded
    try:
        yield
    finally:
        JITFunction.run = launch


@contextmanager
def described_launches() -> Iterator[list[tuple[Any, KernelRecord]]]:
    """What this thread launches in the brackets is described and not launched: (kernel, record)
    of each launch, in order. Tensors may be on the device `meta`."""
    found: list[tuple[Any, KernelRecord]] = []
    launch, thread = JITFunction.run, threading.get_ident()

    def described(fn: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return launch(fn, *args, grid=grid, warmup=warmup, **options)
        found.append((fn, launch_record(fn, args, options)))

    JITFunction.run = described
    try:
        yield found
    finally:
        JITFunction.run = launch


def launch_record(fn: Any, args: tuple, options: Mapping[str, Any]) -> KernelRecord:
    """What a launch with these arguments compiles.

    Raises  TypeError: they are not the kernel's, as a launch says it
    """
    binder = create_function_from_signature(fn.signature, fn.params, make_backend(BINDER_TARGET))
    bound, specialised, rest = binder(*args, **options)
    signature: dict[str, object] = {}
    constants: dict[str, object] = {}
    aligned: list[str] = []
    for (name, value), (kind, hint) in zip(bound.items(), specialised, strict=True):
        signature[name] = kind
        kept = _constants(kind, value)
        if kept is not None or kind == "constexpr":
            constants[name] = kept
        aligned += _aligned(name, value, hint)
    taken = {name: value for name, value in rest.items() if name not in OF_LAUNCHES}
    return KernelRecord(fn.__name__, signature, constants, taken, tuple(aligned))


def _constants(kind: Any, value: Any) -> Any:
    """What of an argument is compiled in: itself, or of a tuple its constants, None for others."""
    if isinstance(kind, tuple):
        kept = [_constants(inner, one) for inner, one in zip(kind, value, strict=True)]
        return type(value)(*kept) if hasattr(value, "_fields") else tuple(kept)
    return unwrap(value) if kind == "constexpr" else None


def _aligned(path: str, value: Any, hint: Any) -> Iterator[str]:
    """Paths of what 16 divides."""
    if isinstance(hint, tuple):
        names = getattr(value, "_fields", None) or range(len(hint))
        for name, one, inner in zip(names, value, hint, strict=True):
            yield from _aligned(f"{path}.{name}", one, inner)
    elif isinstance(hint, str) and "D" in hint:
        yield path


def jit_function(value: Any) -> Any:
    """The kernel inside of what autotuning and heuristics wrap around it; None of anything else."""
    while not isinstance(value, JITFunction) and hasattr(value, "fn"):
        value = value.fn
    return value if isinstance(value, JITFunction) else None


def parameters(fn: Any) -> dict[str, bool]:
    """A kernel's parameters in order: is it a constant of compilation?"""
    return {one.name: bool(one.is_constexpr) for one in fn.params}


def renamed(fn: Any, name: str) -> Any:
    """The same kernel under another name, which profiles show and assembly has, with compiled
    forms of its own."""
    inner = fn.fn
    other = types.FunctionType(inner.__code__, inner.__globals__, name, inner.__defaults__)
    other.__annotations__, other.__module__ = inner.__annotations__, inner.__module__
    other.__qualname__, other.__doc__ = name, inner.__doc__
    return type(fn)(other)


def defaults(fn: Any) -> dict[str, Any]:
    """The parameters' default values."""
    return {one.name: unwrap(one.default) for one in fn.params if one.has_default}
