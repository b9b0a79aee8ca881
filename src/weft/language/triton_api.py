"""The only file that touches Triton's private API.

It gives the rest of weft four things, whatever the Triton version (3.6 and later):

* builtins that know their target while a kernel is traced, and call `@triton.jit` code from there;
* ahead-of-time compilation for a target that is not here;
* a backend, "emu", whose binary is TTIR text with source locations;
* a driver that hands every ordinary launch to a callback.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir, passes
from triton.backends import Backend, backends
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.language import core
from triton.runtime.driver import driver as driver_config

from weft.base.errors import CompileError, WeftError
from weft.base.place import Frame, Place
from weft.base.records import KernelRecord
from weft.base.target import Target

TRITON_VERSION = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])

constexpr = core.constexpr
INT1, INT32, INT64 = core.int1, core.int32, core.int64
FLOAT32 = core.float32
JITFunction = triton.runtime.jit.JITFunction
# More wait for each other: Triton's front end is Python.
COMPILE_THREADS = 8


# ---------------------------------------------------------------------------------------------
# Stores with an order


# From 3.9 on Triton has them. Before, an exchange whose result nobody wants stands in, and that is
# an atomic: it comes back from the rank it went to, where a store is sent and forgotten.
HAS_ORDERED_STORES = TRITON_VERSION >= (3, 9)

if HAS_ORDERED_STORES:

    @triton.jit
    def ordered_store(ptr, value, order: core.constexpr, scope: core.constexpr):
        core.atomic_store(ptr, core.cast(value, ptr.dtype.element_ty), sem=order, scope=scope)

else:

    @triton.jit
    def ordered_store(ptr, value, order: core.constexpr, scope: core.constexpr):
        core.atomic_xchg(ptr, value, sem=order, scope=scope)


# ---------------------------------------------------------------------------------------------
# While a kernel is traced


def builtin(fn: Callable) -> Callable:
    """Make `fn` callable from kernels; it receives `_semantic` and `_generator` by keyword."""
    return core.builtin(fn)


class _SourceStamp(triton.runtime.jit.JITCallable):
    """Something that only has a cache key: what it stamps enters the key of kernels using it."""

    def __init__(self, version: Callable[[], int]) -> None:  # no source of its own to parse
        self.version = version
        self.used_global_vals: dict = {}
        self.__name__ = "weft_source_stamp"

    @property
    def cache_key(self) -> str:
        return f"weft-{self.version()}"


def stamped_builtin(fn: Callable, version: Callable[[], int]) -> Callable:
    """A builtin whose `version()` enters the cache key of every kernel that mentions it.

    Triton leaves builtins out of its keys, and with them the `@triton.jit` code they call; but
    it does look into what calls itself an aggregate.
    """
    traced = core.builtin(fn)
    traced.__triton_aggregate__ = True
    traced.hash_attrs = [_SourceStamp(version)]
    return traced


def unwrap(value: Any) -> Any:
    """The Python value of a constexpr; anything else unchanged."""
    return value.value if isinstance(value, core.constexpr) else value


def is_tensor(value: Any) -> bool:
    """Is `value` a traced tensor (or scalar) rather than a compile-time constant?"""
    return isinstance(value, core.tensor)


def is_pointer(value: Any) -> bool:
    return is_tensor(value) and value.dtype.is_ptr()


def to_tensor(semantic: Any, value: Any) -> Any:
    """`value` as a traced tensor: Python numbers become scalars."""
    return value if is_tensor(value) else semantic.to_tensor(unwrap(value))


def backend_name(semantic: Any) -> str:
    """The compile target's backend, "cuda", "hip" or "emu": not the active driver's."""
    return semantic.builder.options.backend_name


def cuda_arch(semantic: Any) -> int:
    """The compute capability that is compiled for, times ten: 80, 90, 100; 0 when not CUDA."""
    if backend_name(semantic) != "cuda":
        return 0
    return int(re.sub(r"\D", "", str(semantic.builder.options.arch)))


def is_gluon(semantic: Any) -> bool:
    """Is a Gluon kernel traced, whose new tiles need layouts?"""
    return type(semantic).__name__ == "GluonSemantic"


def cast(semantic: Any, value: Any, dtype: Any) -> Any:
    """`value`, a number or a traced scalar, as a traced value of `dtype`."""
    if not is_tensor(value):
        return semantic.scalar_constant(unwrap(value), dtype)
    return semantic.cast(value, dtype)


def reshape(semantic: Any, value: Any, shape: Sequence[int]) -> Any:
    """A tile in another shape, its elements in the same order."""
    return core.reshape(value, list(shape), _semantic=semantic)


def num_warps(semantic: Any) -> int:
    """With how many warps the kernel is launched."""
    return semantic.builder.options.num_warps


def is_tuple(value: Any) -> bool:
    return isinstance(value, core.tuple)


def tuple_fields(value: Any) -> tuple[str, ...]:
    """The field names of a named tuple that a kernel was handed; empty for anything else."""
    return tuple(value.type.fields or ()) if is_tuple(value) else ()


def make_tuple(values: Sequence[Any]) -> Any:
    """A traced tuple, to be handed to `@triton.jit` code."""
    return core.tuple(list(values))


def call_jit(generator: Any, fn: Any, args: Sequence[Any]) -> Any:
    """Call a `@triton.jit` function from a builtin; constants become constexprs."""
    wrapped = [
        arg if is_tensor(arg) or isinstance(arg, (core.constexpr, core.tuple)) else constexpr(arg)
        for arg in args
    ]
    return generator.call_JitFunction(fn, wrapped, {})


def enclosing_scope(generator: Any) -> Mapping[str, Any]:
    """The variables of the device function that is being traced, by name."""
    return generator.lscope


def enclosing_function(generator: Any) -> str:
    """The name of the device function that is being traced."""
    return getattr(generator, "function_name", "") or ""


def enclosing_name(generator: Any) -> str:
    """The name of that function as its author wrote it."""
    return generator.jit_fn.__name__


def enclosing_line(generator: Any) -> int:
    """The line of the source file that is being traced; 0 when unknown."""
    node = generator.cur_node
    return generator.begin_line + node.lineno if hasattr(node, "lineno") else 0


def extern(semantic: Any, symbol: str, args: Sequence[Any], result: Any, shape: Sequence[int] = ()):
    """An opaque, impure operation named `symbol`; only the emulator knows what it means.

    `result` is the element dtype (or pointer type) of what it returns, `shape` its shape.
    """
    handles = [to_tensor(semantic, arg).handle for arg in args]
    kind = core.block_type(result, list(shape)) if shape else result
    ir_type = kind.to_ir(semantic.builder)
    value = semantic.builder.create_extern_elementwise("", "", symbol, handles, ir_type, False)
    return core.tensor(value, kind)


def link_library(semantic: Any, name: str, path: str) -> None:
    """The kernel that is being traced is linked with the LLVM bitcode at `path`.

    Triton has read its cache's key by now: what decides whether a kernel comes here, and the
    library's version, must be in the kernel's arguments or source.
    """
    options = semantic.builder.options
    libraries = dict(options.extern_libs or ())
    if libraries.setdefault(name, path) == path:
        object.__setattr__(options, "extern_libs", tuple(libraries.items()))


def when_loaded(marker: bytes, act: Callable[[int], None]) -> None:
    """From now on call `act` with the module of each kernel, once loaded, whose binary holds
    `marker`; before its first launch."""

    def look(module: int, function: int, name: str, files: Mapping[str, str], *_: Any) -> None:
        binary = next((path for path in files.values() if str(path).endswith(".cubin")), None)
        if binary is not None and marker in Path(binary).read_bytes():
            act(module)

    triton.knobs.runtime.kernel_load_end_hook.add(look)


# ---------------------------------------------------------------------------------------------
# Ahead of time


def gpu_target(target: Target) -> GPUTarget:
    """Triton's own record for `target`."""
    return GPUTarget(target.backend, target.arch, target.warp_size)


def compile_kernel(fn: Any, record: KernelRecord, target: Target) -> Any:
    """Compile `fn` as `record` says, for `target`; no device is needed.

    Returns Triton's compiled kernel: `.asm` holds every stage, `.metadata` what was decided.
    Raises  CompileError: with the user's line and Triton's reason; what a primitive raised
            while it was traced, with the user's line
    """
    signature, constants, attributes = _specialise(fn, record)
    # Triton 3.10 turns the fusion of multiplies and adds off by default: say it, either way.
    options = {"enable_fp_fusion": True, **record.options}
    if target.backend == "emu":
        install_emulator_backend()
    source_class = ASTSource
    if getattr(fn, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_class = GluonASTSource
    source = source_class(fn, signature, constants, attributes)
    try:
        return triton.compile(source, target=gpu_target(target), options=options)
    except CompilationError as error:
        raise compile_error(error, record.name, target.name) from error


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

    JITFunction.run = hold
    try:
        yield held
    finally:
        JITFunction.run = launch


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


def _specialise(fn: Any, record: KernelRecord) -> tuple[dict, dict, dict]:
    """Triton's signature, constants and attributes, keyed by argument path."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(fn.arg_names):
        kind = record.signature.get(name, "constexpr")
        value = record.constants.get(name)
        signature[name] = _type_words(kind, value, (index,), constants)
        if kind == "constexpr":
            constants[(index,)] = value
        if name in record.divisible_by_16:
            attributes[(index,)] = [["tt.divisibility", 16]]
    for path in filter(lambda name: "." in name, record.divisible_by_16):
        name, field = path.split(".")
        fields = record.constants[name]._fields  # type: ignore[attr-defined]
        place = (fn.arg_names.index(name), fields.index(field))
        attributes[place] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _type_words(kind: Any, value: Any, path: tuple[int, ...], constants: dict) -> Any:
    """A nested list of type words as the tuple (or named tuple) that Triton expects."""
    if not isinstance(kind, (list, tuple)):
        return kind
    words = []
    for index, word in enumerate(kind):
        inner = value[index] if value is not None else None
        words.append(_type_words(word, inner, (*path, index), constants))
        if word == "constexpr":
            constants[(*path, index)] = unwrap(inner)
    named = value if value is not None and hasattr(value, "_fields") else None
    return type(named)(*words) if named is not None else tuple(words)


def compile_error(error: CompilationError, kernel: str, target: str) -> WeftError:
    """Triton's compilation error with the user's line first.

    What a primitive raised while it was traced keeps its class; the rest is a CompileError.
    """
    chain = []
    reason: BaseException = error
    while isinstance(reason, CompilationError):
        chain.append(reason)
        if reason.__cause__ is None:
            break
        reason = reason.__cause__
    text = str(reason).strip() or type(reason).__name__
    if isinstance(reason, CompilationError):
        text = (reason.error_message or "").strip() or text.splitlines()[-1]
    # A list first: a tuple must not be half built while the collector's objects are walked.
    # A call that raises is met twice, as the caller's node and as the callee's.
    frames = [frame for frame, _ in itertools.groupby(map(_frame_of, chain)) if frame]
    place = Place(tuple(frames))
    if isinstance(reason, WeftError):
        return type(reason)(f"{reason.message} (in {kernel}, for {target})", place=place)
    return CompileError(f"{kernel} does not compile for {target}: {text}", place=place)


def _frame_of(error: CompilationError) -> Frame | None:
    node = error.node
    if node is None or error.src is None:
        return None
    # Triton numbers lines within the function; the file is found by its text.
    for file, start in _files_with(error.src):
        return Frame(file, start + node.lineno - 1)
    return Frame("<kernel>", node.lineno)


def _files_with(source: str):
    """(file, first line) of jit functions whose text is `source`."""
    import gc

    for candidate in gc.get_objects():
        # By type: isinstance would ask every object, deprecated ones too, for its __class__.
        if issubclass(type(candidate), JITFunction) and candidate.src == source:
            lines, start = inspect.getsourcelines(candidate.fn)
            offset = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
            yield inspect.getsourcefile(candidate.fn), start + offset
            return


# ---------------------------------------------------------------------------------------------
# The emulator as one of Triton's backends


@dataclasses.dataclass(frozen=True)
class EmulatorOptions:
    """What a launch may say; everything that only shapes GPU code is accepted and ignored."""

    num_warps: int = 4
    num_ctas: int = 1
    num_stages: int = 3
    warp_size: int = 32
    maxnreg: int | None = None
    backend_name: str = "emu"
    arch: str = "emu"
    debug: bool = True
    sanitize_overflow: bool = False
    enable_fp_fusion: bool = True
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False
    supported_fp8_dtypes: tuple[str, ...] = ("fp8e5", "fp8e4nv", "fp8e4b15", "fp8e4b8", "fp8e5b16")
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default: int = 0
    extern_libs: tuple = ()
    instrumentation_mode: str = ""
    ignored: tuple[tuple[str, str], ...] = ()

    def hash(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


class EmulatorBackend(BaseBackend):
    """Stops after Triton's front end: the binary is optimised TTIR with its locations."""

    binary_ext = "emu"
    supports_native_tensor_specialization = True

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "emu"

    def __init__(self, target: GPUTarget) -> None:
        super().__init__(target)
        self.binary_ext = "emu"

    def hash(self) -> str:
        # The binary names source files, weft's own among them: another checkout's would mislead.
        return f"weft-emu-2-{triton.__version__}-{__file__}"

    def parse_options(self, opts: dict) -> EmulatorOptions:
        known = {f.name for f in dataclasses.fields(EmulatorOptions)}
        taken = {k: v for k, v in opts.items() if k in known and v is not None}
        # Triton says debug=False unless asked; device_assert is what an emulator is for.
        taken["backend_name"], taken["debug"] = "emu", True
        options = EmulatorOptions(**taken)
        for name in opts.keys() - known:
            # Triton refuses launch options that the record lacks; each version adds some. Arguments
            # by keyword are among them, an enum's member too, and all is written down as JSON.
            value = opts[name]
            is_plain = isinstance(value, str | int | float | tuple | None)
            object.__setattr__(options, name, value if is_plain else repr(value))
        return options

    def pack_metadata(self, metadata: Any) -> tuple:
        return (metadata.num_warps, metadata.num_ctas, 0)

    def get_codegen_implementation(self, options: Any) -> dict:
        # Any tile extent may enter a dot: the emulator has no tensor core to satisfy.
        return {
            "min_dot_size": lambda lhs, rhs: (1, 1, 1),
            "convert_custom_types": _convert_custom_types,
        }

    def get_module_map(self) -> dict:
        from triton.language.extra.cuda import libdevice

        return {"triton.language.extra.libdevice": libdevice}

    def load_dialects(self, context: Any) -> None:
        pass

    def add_stages(self, stages: dict, options: Any, language: Any = None) -> None:
        stages["ttir"] = lambda module, metadata: _optimise_ttir(module)
        stages["emu"] = _to_text


def _convert_custom_types(arg, dst_ty, fp_downcast_rounding=None, _semantic=None):
    return core.tensor(
        _semantic.builder.create_fp_to_fp(arg.handle, dst_ty.to_ir(_semantic.builder), None), dst_ty
    )


def _optimise_ttir(module: Any) -> Any:
    """Inline and tidy; descriptors stay, since they are what tells an asynchronous store."""
    manager = ir.pass_manager(module.context)
    passes.common.add_inliner(manager)
    if rewrite := getattr(passes.ttir, "add_rewrite_tensor_pointer", None):
        rewrite(manager)
    passes.common.add_canonicalizer(manager)
    passes.common.add_cse(manager)
    passes.common.add_licm(manager)
    passes.common.add_symbol_dce(manager)
    manager.run(module, "weft_ttir")
    return module


def _to_text(module: Any, metadata: dict) -> bytes:
    metadata["name"] = re.search(r"tt\.func public @\"?([\w.$<>-]+)", str(module)).group(1)
    metadata["shared"] = 0
    return str(module).encode()


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

    def __init__(self) -> None:
        self.utils = _NoDevice()
        self.launcher_cls = _Launcher
        self.get_current_stream = lambda device=None: 0
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("emu", 0, 32)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_device_interface(self):
        return _NoClock

    def get_benchmarker(self):
        # The first configuration wins: the emulator has no time to measure.
        return lambda kernel_call, *, quantiles=(0.5, 0.2, 0.8), **_: [0.0] * len(quantiles)

    def get_empty_cache_for_benchmark(self):
        import torch

        return torch.empty(1, dtype=torch.int8)

    def clear_cache(self, cache: Any) -> None:
        pass

    def assemble_tensormap_to_arg(self, tensormaps_info: Any, args: Any) -> Any:
        return args


@dataclasses.dataclass(frozen=True)
class Launch:
    """One ordinary Triton launch, as the driver took it.

    `args` holds every argument by name, constexprs included; `text` is the kernel's TTIR.
    """

    name: str
    text: str
    grid: tuple[int, int, int]
    args: dict[str, Any]
    signature: Mapping[str, Any]
    num_warps: int
    cooperative: bool
    jit_function: Any


class _Launcher:
    """Triton makes one per compiled kernel and calls it at each launch."""

    on_launch: Callable[[Launch], None] | None = None

    def __init__(self, source: Any, metadata: Any) -> None:
        self.source = source
        self.metadata = metadata

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
            )
        )


def install_emulator_backend() -> None:
    """Make "emu" a target that Triton can compile for; idempotent."""
    backends.setdefault("emu", Backend(EmulatorBackend, EmulatorDriver))


def take_launches(on_launch: Callable[[Launch], None], num_sms: int) -> Callable[[], None]:
    """Send every Triton launch of this process to `on_launch`; returns how to undo it."""
    install_emulator_backend()
    before = driver_config._active
    before_hook = _Launcher.on_launch
    EmulatorDriver.device_properties["multiprocessor_count"] = num_sms
    _Launcher.on_launch = staticmethod(on_launch)  # type: ignore[assignment]
    driver_config.set_active(EmulatorDriver())

    def restore() -> None:
        driver_config._active = before
        _Launcher.on_launch = before_hook

    return restore
