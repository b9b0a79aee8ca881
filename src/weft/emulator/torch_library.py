"""`torch.library.custom_op` of emulated ranks.

An operator is registered with the process. Where each rank registers its own under one name, the
first one's is for all, and each rank's calls run the function that it gave itself, whose globals
are its own. What is for CUDA's tensors is for the CPU's, where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from weft.emulator.context import current

Functions = dict[int, Callable]


def intercept_library() -> Callable[[], None]:
    """Register operators once for all ranks; returns the undo."""
    base = torch.library.custom_op
    known: dict[str, tuple[Any, Functions]] = {}

    def custom_op(name: str, fn: Callable | None = None, /, **options: Any) -> Any:
        if fn is None:
            return lambda given: custom_op(name, given, **options)
        context = current()
        if context is None:
            return base(name, fn, **options)
        if name in known:
            operator, functions = known[name]
            functions[context.rank] = fn
            return operator
        functions: Functions = {context.rank: fn}
        devices = options.pop("device_types", None)
        operator = base(name, _of_rank(functions, fn), device_types=_here(devices), **options)
        known[name] = operator, functions
        return operator

    torch.library.custom_op = custom_op  # type: ignore[assignment]

    def restore() -> None:
        torch.library.custom_op = base

    return restore


def _of_rank(functions: Functions, first: Callable) -> Callable:
    @wraps(first)
    def run(*args: Any, **options: Any) -> Any:
        context = current()
        return functions.get(-1 if context is None else context.rank, first)(*args, **options)

    return run


def _here(devices: Any) -> Any:
    if devices is None:
        return None
    named = (devices,) if isinstance(devices, str) else tuple(devices)
    return tuple(dict.fromkeys("cpu" if one == "cuda" else one for one in named))
