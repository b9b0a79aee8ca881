"""weft: Triton kernels that communicate between GPUs, on emulated ranks or on real ones.

    import weft, weft.language as wl

    world = weft.init()              this rank's world: symmetric memory, signals, streams
    kernel[grid](world.arg, ...)     a @triton.jit kernel that calls wl.put, wl.notify, wl.wait, ...
    weft.ops.ag_gemm(a, b, world=world)      operators on torch tensors
    @weft.program(...)               a tensor program with collectives, for the compiler
    weft.parallelize(model, world)   a torch model, its layers spread over the ranks
    weft.prepare(op, sizes, world=world)     compile now what calls of these sizes launch
    weft.mailbox(nbytes, world=world)        memory for messages between two ranks
    weft.tune(op, sizes, world=world)        measure now how calls of these sizes are best done
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
    from weft import emulator, language, layers, megakernel, models, ops, runtime, verify
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
        NotPreparedError,
        NotSymmetricError,
        OutOfBoundsError,
        OutOfMemoryError,
        OutOfResourcesError,
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
    from weft.layers.inductor_pass import inductor_pass
    from weft.layers.parallelize import parallelize
    from weft.plan.messages import mailbox
    from weft.plan.prepare import prepare
    from weft.runtime import World, init, world
    from weft.tune.choosing import tune

__version__ = "0.1.0"

# Where each public name lives: "module" for a module, "module:attribute" for what is in one.
_NAMES = {
    "init": "weft.runtime:init",
    "world": "weft.runtime:world",
    "World": "weft.runtime:World",
    "emulated": "weft.emulator:emulated",
    "program": "weft.compiler:program",
    "mailbox": "weft.plan.messages:mailbox",
    "prepare": "weft.plan.prepare:prepare",
    "parallelize": "weft.layers.parallelize:parallelize",
    "tune": "weft.tune",
    "Report": "weft.base.report:Report",
    "Order": "weft.base.vocabulary:Order",
    "Scope": "weft.base.vocabulary:Scope",
    "SignalOp": "weft.base.vocabulary:SignalOp",
    "language": "weft.language",
    "ops": "weft.ops",
    "megakernel": "weft.megakernel",
    "layers": "weft.layers",
    "models": "weft.models",
    "inductor_pass": "weft.layers.inductor_pass:inductor_pass",
    "emulator": "weft.emulator",
    "runtime": "weft.runtime",
    "verify": "weft.verify",
}
_ERRORS = "weft.base.errors"

# What runs programs, what they call of operators, what runs them as one kernel; how calls are done,
# and what they launch.
provide(
    executor="weft.plan",
    collectives="weft.ops",
    persistent="weft.megakernel",
    console="weft.tools.console",
    choices="weft.plan.choices",
    preparing="weft.plan.prepare",
)

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
    "NotPreparedError",
    "NotSymmetricError",
    "Order",
    "OutOfBoundsError",
    "OutOfMemoryError",
    "OutOfResourcesError",
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
    "inductor_pass",
    "init",
    "language",
    "layers",
    "mailbox",
    "megakernel",
    "models",
    "ops",
    "parallelize",
    "prepare",
    "program",
    "runtime",
    "tune",
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
