"""`torch.cuda` of an emulated rank: hosts written for GPUs run as they are.

Tensors lie on the CPU. A device that is named "cuda", or by a number, is taken for it wherever
torch makes or moves tensors; streams, events and graphs are those of the emulated machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from importlib.machinery import PathFinder
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nvtx
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.utils import _device

from weft.base.errors import UsageError
from weft.base.topology import Topology
from weft.base.user_place import is_users, user_place
from weft.emulator.context import RankStream, context_of_rank, current
from weft.emulator.recording import Recording
from weft.language import triton_api

HOPPER = 90
MEMORY_BYTES = 80 << 30

_LIKE = [f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")]
_NEW = ["new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor"]


class Stream(RankStream):
    """A stream of the calling rank; `stream` names one of the machine's instead of a new one."""

    def __init__(self, device: Any = None, priority: int = 0, *, stream: Any = None) -> None:
        context = context_of_rank("torch.cuda.Stream")
        if stream is None:
            number = context.belongings[Stream] = context.belongings.get(Stream, 0) + 1
            stream = context.device.stream(context.rank, f"cuda {number}")
        super().__init__(context, stream)
        self.priority = priority

    @property
    def cuda_stream(self) -> int:
        return self.stream.number

    stream_id = cuda_stream

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream is self.stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def wait_stream(self, other: Stream) -> None:
        self.context.order(self.stream, other.stream)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.stream.idle


class Event:
    """A point in a stream. Times are the host's clock: an emulated machine has none."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self._mark: Any = None
        self._stream: Stream | None = None
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()
        self._mark = self._stream.context.mark(self._stream.stream)
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        if self._mark is not None:  # as on GPUs: one that was never recorded is over
            later = stream or current_stream()
            later.context.follow(later.stream, self._mark)

    def query(self) -> bool:
        return self._mark is None or self._mark.done

    def synchronize(self) -> None:
        if self._mark is not None and self._stream is not None:
            context, mark = self._stream.context, self._mark
            context.hosts.wait(lambda: mark.done, "an event")
            context.hosts.current().clock.join(mark.clock)

    def elapsed_time(self, end: Event) -> float:
        return (end._time - self._time) * 1e3


class CUDAGraph:
    """A recording of the calling rank's, by the names of torch's."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._recording: Recording | None = None

    def capture_begin(self, *pool: Any, **options: Any) -> None:
        self._recording = Recording(context_of_rank("torch.cuda.CUDAGraph"))
        self._recording.__enter__()

    def capture_end(self) -> None:
        self._given().__exit__(None)

    def replay(self) -> None:
        self._given().replay()

    def reset(self) -> None:
        self._recording = None

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def _given(self) -> Recording:
        if self._recording is None:
            raise UsageError("the graph holds nothing: capture first", place=user_place())
        return self._recording


@contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **options: Any
) -> Iterator[None]:
    """Capture what is queued in the brackets."""
    with stream or Stream():
        cuda_graph.capture_begin()
        try:
            yield
        except BaseException as error:
            cuda_graph._given().__exit__(type(error))
            raise
        cuda_graph.capture_end()


def current_stream(device: Any = None) -> Stream:
    return Stream(stream=context_of_rank("torch.cuda.current_stream").stream)


def default_stream(device: Any = None) -> Stream:
    context = context_of_rank("torch.cuda.default_stream")
    return Stream(stream=context.device.stream(context.rank))


def set_stream(stream: Stream) -> None:
    stream.context.stream = stream.stream


def synchronize(device: Any = None) -> None:
    """Wait for all streams of the rank."""
    context = context_of_rank("torch.cuda.synchronize")
    context.refuse_reads_of_recordings()
    for stream in context.device.streams(context.rank):
        context.synchronize(stream)


def _properties(arch: int) -> SimpleNamespace:
    known = triton_api.EmulatorDriver.device_properties
    return SimpleNamespace(
        name="emulated GPU", major=arch // 10, minor=arch % 10, total_memory=MEMORY_BYTES,
        multi_processor_count=known["multiprocessor_count"], warp_size=known["warpSize"],
        shared_memory_per_block_optin=known["max_shared_mem"],
        regs_per_multiprocessor=known["max_num_regs"],
    )  # fmt: skip


def _nothing() -> Callable[..., None]:
    """What asks nothing of an emulated machine; a function for each name."""
    return lambda *args, **options: None


# ---------------------------------------------------------------------------------------------


class _Replaced:
    """What of torch is replaced, by whom; `put_back` and `put` may take turns.

    torch.compile keeps a table of torch's functions, which is to be of its own ones. So all is put
    back while it is imported, of which sys.meta_path is asked, and later it finds its own by name.
    """

    def __init__(self) -> None:
        self.values: list[tuple[Any, str, Any]] = []
        self._own: list[tuple[Any, str, Any]] = []

    def add(self, where: Any, name: str, value: Any) -> None:
        self.values.append((where, name, value))

    def put(self) -> None:
        values = list(self.values)
        rules = sys.modules.get("torch._dynamo.trace_rules")
        if rules is not None:
            values.append((rules, "load_object", self._finding_own(rules.load_object)))
        self._own = [(where, name, getattr(where, name)) for where, name, _ in values]
        self._set(values)

    def _finding_own(self, load: Callable[[str], Any]) -> Callable[[str], Any]:
        def load_object(name: str) -> Any:
            found = load(name)
            pairs = zip(self.values, self._own, strict=False)
            return next((own for (*_, value), (*_, own) in pairs if value is found), found)

        return load_object

    def put_back(self) -> None:
        self._set(self._own)

    @staticmethod
    def _set(values: list[tuple[Any, str, Any]]) -> None:
        for where, name, value in values:
            setattr(where, name, value)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = PathFinder.find_spec(name, path) if name == "torch._dynamo" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                self.put_back()
                try:
                    execute(module)
                finally:
                    self.put()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def intercept_cuda(topology: Topology, arch: int = 0) -> Callable[[], None]:
    """Answer torch.cuda for emulated ranks, and take its devices for the CPU; returns the undo.

    Scripts are told that they run on `arch`, on Hopper where it says nothing.
    """
    replaced = _Replaced()
    makers = {id(maker) for maker in _device._device_constructors()}
    for name, value in vars(torch).items():
        if id(value) in makers or name in _LIKE:
            replaced.add(torch, name, _made_on_the_cpu(value))
    for name in (*_NEW, "to"):
        replaced.add(torch.Tensor, name, _made_on_the_cpu(getattr(torch.Tensor, name)))
    for name in ("cuda", "pin_memory"):
        replaced.add(torch.Tensor, name, lambda self, *args, **options: self)
    replaced.add(torch.Tensor, "cpu", _copied(torch.Tensor.cpu))
    for where, name in (
        (_device.DeviceContext, "__init__"), (dist, "init_process_group"),
        (c10d, "init_process_group"), (dist, "init_device_mesh"),
        (device_mesh, "init_device_mesh"), (torch.autocast, "__init__"),
    ):  # fmt: skip
        replaced.add(where, name, _made_on_the_cpu(getattr(where, name)))
    for name, value in _functions(topology, arch or HOPPER).items():
        replaced.add(torch.cuda, name, value)
    for name in ("range_push", "range_pop", "mark"):
        replaced.add(nvtx, name, _nothing())
    for name in ("CUDAPluggableAllocator", "change_current_allocator"):
        replaced.add(torch.cuda.memory, name, _nothing())
    replaced.put()
    sys.meta_path.insert(0, replaced)  # type: ignore[arg-type]

    def restore() -> None:
        sys.meta_path.remove(replaced)  # type: ignore[arg-type]
        replaced.put_back()

    return restore


def _rank() -> int:
    return context_of_rank("torch.cuda").rank


def _functions(topology: Topology, arch: int) -> dict[str, Any]:
    count = _for_users(torch.cuda.device_count, lambda: topology.seat(_rank())[2])
    return {
        "is_available": _for_users(torch.cuda.is_available, lambda: True), "device_count": count,
        "Stream": Stream, "Event": Event, "CUDAGraph": CUDAGraph, "graph": graph,
        "stream": lambda stream: nullcontext() if stream is None else stream,
        "current_stream": current_stream, "default_stream": default_stream,
        "set_stream": set_stream, "synchronize": synchronize,
        "current_device": lambda: topology.seat(_rank())[1],
        "set_device": _nothing(), "init": _nothing(), "_sleep": _nothing(),
        "device": lambda device: nullcontext(),
        "get_device_properties": lambda device=None: _properties(arch),
        "get_device_name": lambda device=None: _properties(arch).name,
        "get_device_capability": lambda device=None: divmod(arch, 10),
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
        "can_device_access_peer": lambda device, peer: True,
        "is_current_stream_capturing": lambda: (
            context_of_rank("torch.cuda").recording is not None
        ),
    }  # fmt: skip


def is_cuda(device: Any) -> bool:
    """Does this name a GPU, as torch takes it?"""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return type(device) is int


def _made_on_the_cpu(base: Callable) -> Callable:
    """`base`, whose `device`, or a positional argument in its place, may name a GPU."""
    name = getattr(base, "__name__", "")
    where = {"to": 1, "__init__": 1, "init_device_mesh": 0}.get(name)

    @wraps(base)
    def made(*args: Any, **options: Any) -> Any:
        for word in ("device", "device_type", "device_id"):
            if word in options and is_cuda(options[word]):
                options[word] = None if word == "device_id" else "cpu"
        if options.get("pin_memory"):
            options["pin_memory"] = False
        if where is not None and len(args) > where and is_cuda(args[where]):
            args = (*args[:where], "cpu", *args[where + 1 :])
        return base(*args, **options)

    return made


def _copied(base: Callable) -> Callable:
    """From a GPU to the host is always a copy."""

    @wraps(base)
    def cpu(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        host, context = base(self, *args, **options), current()
        if host is not self or context is None:
            return host
        if type(self) in (torch.Tensor, torch.nn.Parameter):
            context.host_read(self)
        return host.clone()

    return cpu


def _for_users(base: Callable, answer: Callable[[], Any]) -> Callable:
    """`answer` for a script; torch itself is to go on as without a GPU."""

    @wraps(base)
    def asked() -> Any:
        users = is_users(sys._getframe(1).f_code.co_filename)
        return answer() if users and current() is not None else base()

    return asked
