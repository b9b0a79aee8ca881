"""The only folder that touches Triton's private API, whatever the version (3.6 and later).

Each file says at its head what of Triton it depends on:

* `tracing.py`: builtins that know their target while a kernel is traced;
* `ahead.py`: launches that are compiled and not launched;
* `compiling.py`: compiling ahead of time, `compile_errors.py`: its errors with the user's line;
* `launching.py`: launches on GPUs, prepared and repeated;
* `specialising.py`: what a launch would compile, as a record;
* `emulator_backend.py`, `emulator_driver.py`: the emulator as a target and as a driver;
* `versions.py`: what differs between versions.
"""

from __future__ import annotations

from triton.runtime.driver import driver as driver_config

from weft.language.triton_api.ahead import compile_launch, compiling_for
from weft.language.triton_api.compile_errors import (
    CompilationError,
    JITFunction,
    compile_error,
    file_of,
    first_line,
    scan_error,
)
from weft.language.triton_api.compiling import compile_kernel, gpu_target
from weft.language.triton_api.emulator_backend import EmulatorBackend, EmulatorOptions
from weft.language.triton_api.emulator_driver import (
    EmulatorDriver,
    Launch,
    end_graphs_at_launches,
    install_emulator_backend,
    take_launches,
)
from weft.language.triton_api.launching import (
    COMPILE_THREADS,
    BoundLaunch,
    bound_launch,
    compile_held,
    held_launches,
    launches_are_held,
    load_kernel,
    relaunch,
    relauncher,
    when_loaded,
)
from weft.language.triton_api.specialising import (
    LeftOut,
    described_launches,
    kinds_of,
    recorded_launches,
    renamed,
    watched_compilations,
    when_compiled,
)
from weft.language.triton_api.tracing import (
    FLOAT32,
    INT1,
    INT32,
    INT64,
    Traced,
    assembly,
    at_line,
    backend_name,
    builtin,
    call_jit,
    cast,
    constexpr,
    cuda_arch,
    enclosing_function,
    enclosing_line,
    enclosing_name,
    enclosing_scope,
    extern,
    is_gluon,
    is_one_of,
    is_pointer,
    is_tensor,
    is_tuple,
    link_library,
    make_tuple,
    num_warps,
    put_together,
    reshape,
    stamped_builtin,
    taken_apart,
    to_tensor,
    tuple_fields,
    unwrap,
)
from weft.language.triton_api.versions import HAS_ORDERED_STORES, TRITON_VERSION, ordered_store

__all__ = [
    "COMPILE_THREADS", "FLOAT32", "HAS_ORDERED_STORES", "INT1", "INT32", "INT64", "TRITON_VERSION",
    "BoundLaunch", "CompilationError", "EmulatorBackend", "EmulatorDriver", "EmulatorOptions",
    "JITFunction", "Launch", "LeftOut", "Traced", "assembly", "at_line", "backend_name",
    "bound_launch", "builtin", "call_jit", "cast", "compile_error", "compile_held",
    "compile_kernel", "compile_launch", "compiling_for", "constexpr", "cuda_arch",
    "described_launches", "driver_config", "enclosing_function", "enclosing_line", "enclosing_name",
    "enclosing_scope", "end_graphs_at_launches", "extern", "file_of", "first_line", "gpu_target",
    "held_launches", "install_emulator_backend", "is_gluon", "is_one_of", "is_pointer", "is_tensor",
    "is_tuple", "kinds_of", "launches_are_held", "link_library", "load_kernel", "make_tuple",
    "num_warps", "ordered_store", "put_together", "recorded_launches", "relaunch", "relauncher",
    "renamed", "reshape", "scan_error", "stamped_builtin", "take_launches", "taken_apart",
    "to_tensor", "tuple_fields", "unwrap", "watched_compilations", "when_compiled", "when_loaded",
]  # fmt: skip
