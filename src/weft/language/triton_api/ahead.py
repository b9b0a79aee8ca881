"""Launches that are compiled for a target, which need not be here, and left in Triton's cache.

A launch asks that cache by all that Triton knows of it. So it is compiled here on the same way, by
`warmup`, with a driver whose device is the target.

Of Triton: what a launch asks of the active driver; `JITFunction.warmup`; the table of the active
driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver as driver_config

from weft.base.target import Target
from weft.language.triton_api.compiling import gpu_target
from weft.language.triton_api.emulator_driver import EmulatorDriver, install_emulator_backend
from weft.language.triton_api.specialising import LeftOut


class _Elsewhere(EmulatorDriver):
    """A device that is not here: nothing can be launched on it, or loaded."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        # Kernels are kept by device: apart from those of devices that are here.
        self.get_current_device = lambda: ("elsewhere", target)

    def get_current_target(self) -> GPUTarget:
        return gpu_target(self.target)


@contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Meanwhile this process compiles for `target`, and launches nothing."""
    install_emulator_backend()
    before = driver_config._active
    driver_config.set_active(_Elsewhere(target))
    try:
        yield
    finally:
        driver_config._active = before


def compile_launch(launch: LeftOut) -> Any:
    """Compile what it would launch on the active driver's device, unless Triton's cache has it."""
    return launch.fn.warmup(*launch.arguments, grid=(1,), **launch.options)
