"""The emulator as Triton's driver: every ordinary launch goes to a callback.

Of Triton: `DriverBase` and what launches, autotuning and `triton.testing` ask of a driver; `run` of
what can be launched; the launcher that is made for each compiled kernel; the tables of backends and
of the active driver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.language import target_info
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.driver import driver as driver_config
from triton.runtime.jit import JITFunction

from weft.base.errors import OutOfResourcesError
from weft.base.place import Frame, Place
from weft.language.triton_api.emulator_backend import HOPPER, EmulatorBackend


class _NoDevice:
    """What Triton asks of a device, answered for the emulated one."""

    @staticmethod
    def load_binary(name: str, binary: bytes, shared: int, device: int):
        return None, binary.decode(), 32, 0, 1 << 20

    @staticmethod
    def get_device_properties(device: int) -> dict:
        return {**EmulatorDriver.device_properties}


class _NoClock:
    """What triton.testing asks of torch.cuda: every launch takes a second, so it repeats few."""

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            pass

        def record(self, stream: Any = None) -> None:
            pass

        def elapsed_time(self, other: Any) -> float:
            return 1000.0

    @staticmethod
    def synchronize(device: Any = None) -> None:
        pass


class EmulatorDriver(DriverBase):
    """Hands launches to `on_launch`; streams and devices are the emulator's business."""

    device_properties: dict[str, int] = {
        "max_shared_mem": 232448,
        "max_num_regs": 65536,
        "multiprocessor_count": 132,
        "warpSize": 32,
        "sm_clock_rate": 1980000,
        "mem_clock_rate": 2619000,
        "mem_bus_width": 6144,
    }

    def __init__(self, arch: int = 0) -> None:
        self.utils = _NoDevice()
        self.launcher_cls = _Launcher
        self.target = GPUTarget("emu", arch, 32)
        self.get_current_stream = lambda device=None: 0
        # Triton keeps what it has compiled by device, and front ends ask for the architecture.
        self.get_current_device = lambda: arch
        self.set_current_device = lambda device: None

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_interface(self):
        return _NoClock

    def get_benchmarker(self):
        # The first configuration wins: the emulator has no time to measure.
        return lambda kernel_call, *, quantiles=(0.5, 0.2, 0.8), **_: [0.0] * len(quantiles)

    def get_empty_cache_for_benchmark(self):
        return torch.empty(1, dtype=torch.int8)

    def clear_cache(self, cache: Any) -> None:
        pass

    def assemble_tensormap_to_arg(self, tensormaps_info: Any, args: Any) -> Any:
        return args


@dataclasses.dataclass(frozen=True)
class Launch:
    """One ordinary Triton launch, as the driver took it.

    `args` holds every argument by name, constexprs included; `text` is the kernel's TTIR, and
    `written`, of one with loops that may be waits, that in which nothing was removed yet.
    """

    name: str
    text: str
    grid: tuple[int, int, int]
    args: dict[str, Any]
    signature: Mapping[str, Any]
    num_warps: int
    cooperative: bool
    jit_function: Any
    written: str = ""


TENSOR_COLUMNS = 512


class OutOfResources(triton.OutOfResources, OutOfResourcesError):
    """What autotuning takes for a configuration that does not run."""

    __str__ = Exception.__str__

    def __init__(self, fn: Any, what: str, required: int, limit: int) -> None:
        code = fn.fn.__code__
        place = Place((Frame(code.co_filename, code.co_firstlineno, fn.__name__),))
        OutOfResourcesError.__init__(
            self,
            f"{fn.__name__} needs {required} {what} at a time, and a block has {limit}: take fewer"
            " stages or smaller tiles",
            place=place,
        )
        self.required, self.limit, self.name = required, limit, what


class _Launcher:
    """Triton makes one per compiled kernel and calls it at each launch."""

    on_launch: Callable[[Launch], None] | None = None

    def __init__(self, source: Any, metadata: Any) -> None:
        self.source = source
        self.metadata = metadata
        most_bytes = EmulatorDriver.device_properties["max_shared_mem"]
        self._check("bytes of shared memory", metadata.shared, most_bytes)
        self._check("columns of tensor memory", metadata.tmem_size, TENSOR_COLUMNS)

    def _check(self, what: str, required: int, limit: int) -> None:
        if required > limit:
            raise OutOfResources(self.source.fn, what, required, limit)

    def __call__(self, grid_x, grid_y, grid_z, stream, function, packed, launch_metadata,
                 enter_hook, exit_hook, *args):  # fmt: skip
        if _Launcher.on_launch is None:
            raise RuntimeError("a kernel was launched on the emulator outside weft.emulated()")
        _Launcher.on_launch(
            Launch(
                name=self.metadata.name,
                text=function,
                grid=(int(grid_x), int(grid_y), int(grid_z)),
                args=dict(zip(self.source.fn.arg_names, args, strict=True)),
                signature=self.source.signature,
                num_warps=self.metadata.num_warps,
                cooperative=self.metadata.launch_cooperative_grid,
                jit_function=self.source.fn,
                written=getattr(self.metadata, "written", ""),
            )
        )


def install_emulator_backend() -> None:
    """Make "emu" a target that Triton can compile for; idempotent."""
    backends.setdefault("emu", Backend(EmulatorBackend, EmulatorDriver))


def _cuda_target(arch: int) -> Callable[[], GPUTarget]:
    def current_target() -> GPUTarget:
        return GPUTarget("cuda", arch, 32)

    current_target.__triton_builtin__ = True  # type: ignore[attr-defined]
    return current_target


def take_launches(
    on_launch: Callable[[Launch], None], num_sms: int, arch: int = 0
) -> Callable[[], None]:
    """Send every Triton launch of this process to `on_launch`; returns how to undo it.

    Gluon kernels are compiled for `arch`; those for 90 and for no architecture are the same.
    """
    install_emulator_backend()
    before = driver_config._active
    before_hook = _Launcher.on_launch
    EmulatorDriver.device_properties["multiprocessor_count"] = num_sms
    _Launcher.on_launch = staticmethod(on_launch)  # type: ignore[assignment]
    driver_config.set_active(EmulatorDriver(arch if arch > HOPPER else 0))
    asked = target_info.current_target
    if arch > HOPPER:  # what descriptors and kernels ask: is it a GPU that has this?
        target_info.current_target = _cuda_target(arch)

    def restore() -> None:
        driver_config._active = before
        target_info.current_target = asked
        _Launcher.on_launch = before_hook

    return restore


def end_graphs_at_launches() -> Callable[[], None]:
    """Let torch.compile run launches between its graphs; returns the undo.

    Without a GPU it takes a launch for ordinary Python, and would compile Triton and the emulator.
    """
    launches = {kind: kind.run for kind in (JITFunction, Autotuner, Heuristics)}
    for kind, run in launches.items():
        kind.run = torch.compiler.disable(run, reason="on emulated ranks a launch ends the graph")

    def restore() -> None:
        for kind, run in launches.items():
            kind.run = run

    return restore
