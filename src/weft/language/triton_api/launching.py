"""Launches on GPUs: kernels compiled or loaded before they start, and started again for less.

Of Triton: `JITFunction.run` and `warmup`; of a compiled kernel its handles, its launcher `run` and
its packed metadata; the active driver's current device and stream; the hooks of `knobs.runtime`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton.runtime.driver import driver as driver_config

from weft.language.triton_api.emulator_driver import EmulatorDriver

JITFunction = triton.runtime.jit.JITFunction
# More wait for each other: Triton's front end is Python.
COMPILE_THREADS = 8


def when_loaded(marker: bytes, act: Callable[[int], None]) -> None:
    """From now on call `act` with the module of each kernel, once loaded, whose binary holds
    `marker`; before its first launch."""

    def look(module: int, function: int, name: str, files: Mapping[str, str], *_: Any) -> None:
        binary = next((path for path in files.values() if str(path).endswith(".cubin")), None)
        if binary is not None and marker in Path(binary).read_bytes():
            act(module)

    triton.knobs.runtime.kernel_load_end_hook.add(look)


def load_kernel(fn: Any, *args: Any, **options: Any) -> None:
    """Compile what a launch with these arguments would run and load it; launch nothing.

    CUDA loads a kernel only while no other runs. One that is to start while another waits for it
    must be there before: its first launch would wait for that other one.
    """
    fn.warmup(*args, grid=(1,), **options)._init_handles()


@contextmanager
def held_launches() -> Iterator[dict[Any, Callable[[], None]]]:
    """What is launched in the brackets is neither compiled nor launched.

    The result has a function for each kernel, which compiles it and leaves it in Triton's cache.
    Whoever launches gets something that does nothing: it must be thrown away with what keeps it.
    """
    held: dict[Any, Callable[[], None]] = {}
    launch = JITFunction.run

    def hold(fn: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        constants = [param.is_constexpr for param in fn.params]
        key = (fn, *map(_kind, args, constants), *sorted(options.items()))
        held.setdefault(key, lambda: launch(fn, *args, grid=grid, warmup=True, **options))
        return _Nothing()

    hold.is_holding = True
    JITFunction.run = hold
    try:
        yield held
    finally:
        JITFunction.run = launch


def launches_are_held() -> bool:
    """Is it now that launches are left out? Nothing must then wait for what one would do."""
    return hasattr(JITFunction.run, "is_holding")


def compile_held(held: Sequence[Callable[[], None]]) -> None:
    """Call functions of `held_launches`, on several threads where Triton can; not on the emulator,
    whose kernels are an emulated rank's, and of its thread."""
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or isinstance(driver_config.active, EmulatorDriver):
        for compile_one in held:
            compile_one()
        return
    with ThreadPoolExecutor(COMPILE_THREADS) as executor, mode(executor):
        for compile_one in held:
            compile_one()


def _kind(value: Any, is_constant: bool) -> Any:
    """What of an argument a kernel depends on, as far as is needed to tell two kernels apart."""
    if isinstance(value, tuple):
        return tuple(_kind(one, is_constant) for one in value)
    if hasattr(value, "data_ptr"):
        return str(value.dtype), value.data_ptr() % 16
    if isinstance(value, int) and not is_constant:
        return value == 1, value % 16 == 0
    return str(value)


class _Nothing:
    """Stands for a kernel that nobody compiled."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: None


def relaunch(kernel: Any, grid: tuple[int, int, int], *args: Any) -> None:
    """Launch again what `fn[grid](...)` returned, with all its arguments in order.

    Spares Triton's look at every argument, half of a launch's time on the host. The caller vouches
    for it that dtypes, divisibility by 16 and being 1 are as they were.
    """
    kernel[grid](*args)


def relauncher(kernel: Any, grid: tuple[int, int, int], rest: Sequence[Any]) -> Any:
    """A function of addresses, f(x, out, ...), that launches `kernel` on them and on `rest`.

    Tensors in `rest` are taken by their addresses, once: the caller keeps their memory, and vouches
    for what `relaunch` asks. None where a launch needs more than addresses, as on the emulator.
    """
    if isinstance(driver_config.active, EmulatorDriver):
        return None
    kernel._init_handles()
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    x, y, z = grid
    device = driver_config.active.get_current_device()
    stream_of = driver_config.active.get_current_stream
    rest = _addresses(rest)
    hooks = triton.knobs.runtime

    def launch(*addresses: int) -> None:
        stream = stream_of(device)
        enter, leave = _set(hooks.launch_enter_hook), _set(hooks.launch_exit_hook)
        about = kernel.launch_metadata(grid, stream, *addresses, *rest) if enter else None
        run(x, y, z, stream, function, metadata, about, enter, leave, *addresses, *rest)

    return launch


def _set(hook: Any) -> Any:
    """A launch hook, None where nobody has set one: an empty chain is called, and costs."""
    return hook if getattr(hook, "calls", hook) else None


def _addresses(values: Any) -> Any:
    """Values, or tuples of them, with tensors' addresses in place of tensors."""
    if isinstance(values, (tuple, list)):
        inner = [_addresses(value) for value in values]
        return type(values)(*inner) if hasattr(values, "_fields") else tuple(inner)
    return values.data_ptr() if hasattr(values, "data_ptr") else values
