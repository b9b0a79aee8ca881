"""Launches on GPUs: kernels compiled or loaded before they start, and started again for less.

Of Triton: `JITFunction.run` and `warmup`; of a compiled kernel its handles, its launcher `run` and
its packed metadata; the active driver's current device and stream; the hooks of `knobs.runtime`. Of
a launcher of 3.6 its flags and scratch sizes, `launch`, which a function that makes descriptors may
stand around, what that function knows, and `make_tensordesc_arg`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from inspect import getclosurevars
from itertools import compress
from operator import is_not
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.runtime.driver import driver as driver_config

from weft.language.triton_api.emulator_driver import EmulatorDriver
from weft.language.triton_api.specialising import (
    LASTING,
    OF_MEMORY,
    Described,
    Pointed,
    Pointing,
    is_alike,
    kinds_of,
    known_of,
    run_time_names,
)

JITFunction = triton.runtime.jit.JITFunction
# More wait for each other: Triton's front end is Python.
COMPILE_THREADS = 8
_RUN = JITFunction.run
# Kernels by what they are compiled for, with the objects that this names.
_loaded: dict[tuple, tuple[Any, list[Any]]] = {}
MOST_LOADED = 4096
# Descriptors of a launch that are kept, by address.
KEPT_DESCRIPTORS = 16
# Arguments that have no address.
PLAIN = frozenset((int, bool, float, str))


def when_loaded(marker: bytes, act: Callable[[int], None]) -> None:
    """From now on call `act` with the module of each kernel, once loaded, whose binary holds
    `marker`; before its first launch."""

    def look(module: int, function: int, name: str, files: Mapping[str, str], *_: Any) -> None:
        binary = next((path for path in files.values() if str(path).endswith(".cubin")), None)
        if binary is not None and marker in Path(binary).read_bytes():
            act(module)

    triton.knobs.runtime.kernel_load_end_hook.add(look)


def load_kernel(fn: Any, *args: Any, **options: Any) -> Any:
    """Compile what a launch with these arguments would run and load it; launch nothing. Returns
    the kernel, for `relaunch` and `bound_launch`.

    CUDA loads a kernel only while no other runs. One that is to start while another waits for it
    must be there before: its first launch would wait for that other one.
    """
    if JITFunction.run is not _RUN:  # somebody takes launches
        return _load(fn, args, options)
    kept: list[Any] = [fn]
    device = driver_config.active.get_current_device()
    key = (id(fn), device, kinds_of(fn, args, kept), *options.items())
    if (found := _loaded.get(key)) is None:
        if len(_loaded) >= MOST_LOADED:
            _loaded.clear()
        found = _loaded[key] = _load(fn, args, options), kept
    return found[0]


def _load(fn: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    kernel = fn.warmup(*args, grid=(1,), **options)
    kernel._init_handles()
    return kernel


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
    start, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    launcher, between = _launcher_of(kernel), ()
    if launcher is not None and not launcher.described:
        start, between = launcher.start, (*launcher.flags, None, None)
    device = driver_config.active.get_current_device()
    stream_of = driver_config.active.get_current_stream
    rest = _addresses(rest)
    hooks = triton.knobs.runtime

    def launch(*addresses: int) -> None:
        stream, enter, leave = stream_of(device), hooks.launch_enter_hook, hooks.launch_exit_hook
        # Of hooks that nobody has set, the chains are empty: they are called, and cost.
        enter = enter if getattr(enter, "calls", enter) else None
        leave = leave if getattr(leave, "calls", leave) else None
        about = kernel.launch_metadata(grid, stream, *addresses, *rest) if enter else None
        start(*grid, stream, function, *between, metadata, about, enter, leave, *addresses, *rest)

    return launch


Find = Callable[[int], tuple[int, int]]
Changed = Callable[[Sequence[int]], Any]


class _Bound(NamedTuple):
    """What launches of one kernel have alike: of each of its arguments what is `known`, and where
    the `values` begin that the kernel takes of it."""

    fn: Any
    options: Mapping[str, Any]
    kernel: Any
    launcher: _Launcher
    known: Sequence[Any]
    begins: Sequence[int]
    values: list[Any]
    # Of arguments that last, by number, where their addresses are put in.
    lasting: dict[int, tuple[int, Changed]]

    def again(
        self, fn: Any, grid: tuple[int, int, int], args: Sequence[Any],
        options: Mapping[str, Any], find: Find, *, finds_alike: bool,
    ) -> BoundLaunch | None:  # fmt: skip
        """The launch with arguments that differ by addresses, or by what follows from m; None where
        they may need another kernel. finds_alike: `find` finds what lasts (LASTING) where it was
        found first."""
        is_same = fn is self.fn and options == self.options and len(args) == len(self.known)
        if not is_same or JITFunction.run is not _RUN:  # somebody takes launches
            return None
        names, run_time = run_time_names(fn)
        changed = [*compress(range(len(args)), map(is_not, args, self.known))]
        for number in changed:
            if not is_alike(names[number], args[number], self.known[number], run_time):
                return None
        about = self
        if not finds_alike:
            changed += [number for number in self.lasting if number not in changed]
            about = self._replace(lasting={})
        return _bound(about, self.values.copy(), grid, args, changed, find)


class BoundLaunch(NamedTuple):
    """`run(places, stream)` launches a kernel with the arguments that it is bound to; `about` those
    that are bound `again`."""

    run: Callable[[Sequence[int], int], None]
    about: _Bound


def bound_launch(
    kernel: Any, fn: Any, grid: tuple[int, int, int], args: Sequence[Any],
    options: Mapping[str, Any], find: Find,
) -> BoundLaunch | None:  # fmt: skip
    """A launch of `kernel`, which `fn[grid](*args, **options)` loads, but for addresses.

    find(address): (i, distance) where the address is to be places[i] + distance at each launch. The
    caller vouches for what `relaunch` asks, and keeps the memory. None where a launch needs more
    than addresses: scratch memory of Triton's, or a launcher of another form than are known.
    """
    launcher = _launcher_of(kernel)
    if launcher is None:
        return None
    begins, values = [], []
    for number, arg in enumerate(args):
        begins.append(len(values))
        # Of descriptors it takes shape and strides too.
        count = 1 + 2 * len(arg.shape) if number in launcher.described else 1
        values += [arg] * count
    known = [known_of(one) for one in args]
    about = _Bound(fn, options, kernel, launcher, known, begins, values, {})
    changed = [i for i, one in enumerate(known) if type(one) in (*LASTING, *OF_MEMORY)]
    return _bound(about, values, grid, args, changed, find)


def _bound(
    about: _Bound, values: list[Any], grid: tuple[int, int, int], args: Sequence[Any],
    changed: Iterable[int], find: Find,
) -> BoundLaunch:  # fmt: skip
    """The launch, with `values` of all arguments but those that are `changed`."""
    kernel, launcher = about.kernel, about.launcher
    open_pointers: list[tuple[int, int, int]] = []
    open_others: list[tuple[int, Changed]] = [*about.lasting.values()]
    for number in changed:
        arg, at, known = args[number], about.begins[number], about.known[number]
        kind = type(known)
        if kind is Pointed:
            values[at] = address = arg.data_ptr()
            place, distance = find(address)
            if place:
                open_pointers.append((at, place, distance))
        elif kind is Described:
            make, address = _descriptor_of(arg, launcher.described[number]), arg.base.data_ptr()
            place, distance = find(address)
            if place:
                open_others.append((at, _kept_descriptors(make, place, distance)))
            whole = (None if place else make(address), *arg.shape, *arg.strides)
            values[at : at + len(whole)] = whole
        elif kind is Pointing or kind in LASTING:
            values[at], changing = _changing(arg, find)
            if changing is not None:
                open_others.append((at, changing))
                if arg is known:
                    about.lasting[number] = at, changing
        else:
            values[at] = arg
    start, function, metadata = launcher.start, kernel.function, kernel.packed_metadata
    flags, hooks = launcher.flags, triton.knobs.runtime

    def launch(places: Sequence[int], stream: int) -> None:
        given = values.copy()
        for at, place, distance in open_pointers:
            given[at] = places[place] + distance
        for at, changed in open_others:
            given[at] = changed(places)
        # As in `relauncher`: a function for both would cost each launch its call.
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        enter = enter if getattr(enter, "calls", enter) else None
        leave = leave if getattr(leave, "calls", leave) else None
        shown = kernel.launch_metadata(grid, stream, *given) if enter else None
        start(*grid, stream, function, *flags, None, None, metadata, shown, enter, leave, *given)

    return BoundLaunch(launch, about)


class _Launcher(NamedTuple):
    """`start` takes grid, stream, function, flags, scratch memory, metadata and hooks, arguments;
    by which arguments are descriptors what the kernel says of each."""

    start: Callable[..., None]
    flags: tuple[Any, ...]
    described: Mapping[int, Any]


@lru_cache(maxsize=MOST_LOADED)
def _launcher_of(kernel: Any) -> _Launcher | None:
    """A kernel's, without what Triton does at each launch; None where its form is not known."""
    kernel._init_handles()
    whole = kernel.run
    try:
        scratch = whole.global_scratch_size, whole.profile_scratch_size
        flags, launch = (whole.launch_cooperative_grid, whole.launch_pdl), whole.launch
        knows = getclosurevars(launch).nonlocals if hasattr(launch, "__closure__") else {}
        if any(scratch) or getattr(whole, "gsan_enabled", False):  # more arguments, by Triton
            return None
        if not knows:
            return _Launcher(_in_one_form(whole, launch), flags, {})
        numbers, described = sorted(knows["tensordesc_indices"]), knows["tensordesc_meta"]
        launch = knows["launcher"]
    except (AttributeError, KeyError):
        return None
    if len(numbers) != len(described) or None in described:
        return None
    return _Launcher(_in_one_form(whole, launch), flags, dict(zip(numbers, described)))


def _in_one_form(whole: Any, launch: Callable[..., None]) -> Callable[..., None]:
    """A kernel's launcher as `_Launcher.start`: from Triton 3.7 on one serves all kernels, has
    scratch memory behind the hooks, and takes the signature and one tuple of all arguments."""
    if not hasattr(whole, "kernel_signature"):
        return launch
    about = whole.arg_annotations, whole.kernel_signature

    def start(*given: Any) -> None:
        place, (scratch, hooks), args = given[:7], (given[7:9], given[9:13]), given[13:]
        launch(*place, *hooks, *scratch, *about, args)

    return start


def _descriptor_of(arg: Any, described: Any) -> Callable[[int], Any]:
    """Makes of an address what the launcher takes for a descriptor like `arg`."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    shape, strides, padding = list(arg.shape), list(arg.strides), arg.padding
    return lambda address: make_tensordesc_arg(
        _Described(_Based(address), shape, strides, padding), described
    )[0]


class _Based(NamedTuple):
    """Memory that is known by its address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class _Described(NamedTuple):
    """A descriptor, as launchers ask it."""

    base: _Based
    shape: list[int]
    strides: list[int]
    padding: str


def _kept_descriptors(
    make: Callable[[int], Any], place: int, distance: int
) -> Callable[[Sequence[int]], Any]:
    """Of the address at a place; those of the last addresses are kept."""
    kept: dict[int, Any] = {}

    def descriptor(places: Sequence[int]) -> Any:
        address = places[place] + distance
        found = kept.get(address)
        if found is None:
            if len(kept) >= KEPT_DESCRIPTORS:
                kept.clear()
            found = kept[address] = make(address)
        return found

    return descriptor


def _changing(values: tuple, find: Find) -> tuple[tuple, Callable[[Sequence[int]], tuple] | None]:
    """A tuple with tensors' addresses in place of tensors; and a function of places that gives it
    with its open addresses, None where there are none."""
    within: list[tuple[int, Callable[[Sequence[int]], Any]]] = []
    own: list[tuple[int, int, int]] = []
    fixed: list[Any] = []
    for number, value in enumerate(values):
        if isinstance(value, tuple):
            value, inner = _changing(value, find)
            if inner is not None:
                within.append((number, inner))
        elif hasattr(value, "data_ptr"):
            value = value.data_ptr()
            place, distance = find(value)
            if place:
                own.append((number, place, distance))
        fixed.append(value)
    if not own and not within:
        return tuple(fixed), None

    def made(places: Sequence[int]) -> tuple:
        given = fixed.copy()
        for number, place, distance in own:
            given[number] = places[place] + distance
        for number, change in within:
            given[number] = change(places)
        return tuple(given)

    return tuple(fixed), made


def _addresses(values: Any) -> Any:
    """Values, or tuples of them, with tensors' addresses in place of tensors."""
    if isinstance(values, (tuple, list)):
        inner = [_addresses(value) for value in values]
        return type(values)(*inner) if hasattr(values, "_fields") else tuple(inner)
    return values.data_ptr() if hasattr(values, "data_ptr") else values
