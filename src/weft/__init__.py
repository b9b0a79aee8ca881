"""weft: Triton kernels that communicate between GPUs, on emulated ranks or on real ones.

    import weft, weft.language as wl

    world = weft.init()              this rank's world: symmetric memory, signals, streams
    kernel[grid](world.arg, ...)     a @triton.jit kernel that calls wl.put, wl.notify, wl.wait, ...
    weft.ops.ag_gemm(a, b, world=world)      operators on torch tensors
    @weft.program(...)               a tensor program with collectives, for the compiler
    with weft.emulated(ranks=4) as ranks:    ranks without GPUs, inside a test
        ranks.run(main)

On the command line: `weft --help`. To learn it: docs/tutorial.md.

This module is lazy: a name is imported when it is first used, so that `import weft` costs nothing
and the language can be used without the runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft.base.providers import provide

if TYPE_CHECKING:
    # What type checkers and editors see of the names below; a test compares the two.
    from weft import emulator, language, megakernel, ops, runtime, verify
    from weft.base.errors import (
        AllocationOrderError,
        CallOrderError,
        CapacityError,
        CompileError,
        ConfigError,
        DeadlockError,
        DeterminismError,
        DtypeError,
        EndlessLoopError,
        FarPointerError,
        FindingError,
        IllegalError,
        NotSymmetricError,
        OutOfBoundsError,
        OutOfMemoryError,
        PeerError,
        PlacementError,
        PoisonedError,
        RaceError,
        ResidencyError,
        ShapeError,
        SignalError,
        TimeoutError,
        UninitializedError,
        UnsupportedError,
        UsageError,
        WeftError,
    )
    from weft.base.report import Report
    from weft.base.vocabulary import Order, Scope, SignalOp
    from weft.compiler import program
    from weft.emulator import emulated
    from weft.runtime import World, init, world

__version__ = "0.1.0"

# Where each public name lives: "module" for a module, "module:attribute" for what is in one.
_NAMES = {
    "init": "weft.runtime:init",
    "world": "weft.runtime:world",
    "World": "weft.runtime:World",
    "emulated": "weft.emulator:emulated",
    "program": "weft.compiler:program",
    "Report": "weft.base.report:Report",
    "Order": "weft.base.vocabulary:Order",
    "Scope": "weft.base.vocabulary:Scope",
    "SignalOp": "weft.base.vocabulary:SignalOp",
    "language": "weft.language",
    "ops": "weft.ops",
    "megakernel": "weft.megakernel",
    "emulator": "weft.emulator",
    "runtime": "weft.runtime",
    "verify": "weft.verify",
}
_ERRORS = "weft.base.errors"

# What runs programs, what they call of operators, and what runs them as one kernel.
provide(executor="weft.plan", collectives="weft.ops", persistent="weft.megakernel")

__all__ = [
    "AllocationOrderError",
    "CallOrderError",
    "CapacityError",
    "CompileError",
    "ConfigError",
    "DeadlockError",
    "DeterminismError",
    "DtypeError",
    "EndlessLoopError",
    "FarPointerError",
    "FindingError",
    "IllegalError",
    "NotSymmetricError",
    "Order",
    "OutOfBoundsError",
    "OutOfMemoryError",
    "PeerError",
    "PlacementError",
    "PoisonedError",
    "RaceError",
    "Report",
    "ResidencyError",
    "Scope",
    "ShapeError",
    "SignalError",
    "SignalOp",
    "TimeoutError",
    "UninitializedError",
    "UnsupportedError",
    "UsageError",
    "WeftError",
    "World",
    "emulated",
    "emulator",
    "init",
    "language",
    "megakernel",
    "ops",
    "program",
    "runtime",
    "verify",
    "world",
]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        module, _, attribute = _NAMES[name].partition(":")
        value = import_module(module)
        if attribute:
            value = getattr(value, attribute)
    elif name.endswith("Error") and hasattr(errors := import_module(_ERRORS), name):
        value = getattr(errors, name)
    else:
        raise AttributeError(f"weft has no {name!r}; it has {', '.join(sorted(_NAMES))}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
