"""NVIDIA GPUs: torch symmetric memory, CUDA streams and graphs, copy engines.

The ranks of a node share one block of host memory that every GPU can reach: the abort word, each
rank's wait reports and each rank's call log. One abort word for all means that a deadline met
anywhere ends every wait of the node, without anyone's host having to pass it on; waits on other
nodes have deadlines of their own. How far nodes are reached is in `nvshmem.py`.
"""

from __future__ import annotations

import atexit
import mmap
import os
import sys
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from weft.base.elements import Axes
from weft.base.errors import CallOrderError, TimeoutError, UnsupportedError, UsageError
from weft.base.settings import Settings
from weft.base.target import Target
from weft.base.topology import Topology
from weft.language import world_layout as layout
from weft.language.wait_report import WaitReport, read_reports
from weft.runtime.backend import (
    CALL_LOG_BYTES,
    Far,
    Life,
    Recording,
    RecordingLife,
    Seats,
    Stream,
)  # fmt: skip
from weft.runtime.backends import nvshmem, rendezvous
from weft.runtime.backends.cuda_driver import Driver
from weft.runtime.backends.reserved_addresses import ReservedAddresses
from weft.runtime.store_meetings import StoreMeetings

LATE_AT_INIT = (
    "every member of the group must call weft.init for it, as often as the others and in the same "
    "order; see whether those ranks failed or are still starting: WEFT_INIT_TIMEOUT_S sets how "
    "long weft.init waits for them"
)
PAGE_BYTES = 4096
REGISTER_PORTABLE_AND_MAPPED = 0x01 | 0x02


class CudaStream:
    """A torch stream with a name."""

    def __init__(self, name: str, stream: torch.cuda.Stream) -> None:
        self.name = name
        self.torch = stream
        # Recorded anew before each use: making an event costs more host time than recording it.
        self._event = torch.cuda.Event()
        self._entered: list[Any] = []

    def wait(self, other: Stream) -> None:
        event = other._event  # type: ignore[attr-defined]
        event.record(other.torch)  # type: ignore[attr-defined]
        self.torch.wait_event(event)

    def synchronize(self) -> None:
        self.torch.synchronize()

    def __enter__(self) -> CudaStream:
        context = torch.cuda.stream(self.torch)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._entered.pop().__exit__(*failure)


class CudaRecording:
    """A CUDA graph. CUDA destroys no graph while another is captured: such a one dies later.

    A kernel takes whatever lies at an address when it runs. A copy is bound to the allocation that
    was there when it was recorded, and to replay it when that is gone ends the process, even where
    another one has come to the same address.
    """

    _dying: list[torch.cuda.CUDAGraph] = []

    def __init__(self, allocation_of: Callable[[int], int] = lambda _: 0) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.replay: Callable[[], None] = self.graph.replay
        # Of what its copies read and write: the allocations, each with an address in it.
        self.copied: dict[int, int] = {}
        self._allocation_of = allocation_of
        # What the driver took for it, by how much less was free: it takes several graphs' at once.
        self.device_bytes = 0

    def add_copied(self, address: int) -> None:
        self.copied[self._allocation_of(address)] = address

    @property
    def is_current(self) -> bool:
        return not self.copied or all(
            number and self._allocation_of(address) == number
            for number, address in self.copied.items()
        )

    def __del__(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            self._dying.append(self.graph)


class CudaBackend:
    """One rank of a group of processes, each with its own GPU."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        settings: Settings,
        *,
        asked: str,
        number: int,
        nodes: int | Sequence[int] | None = None,
    ) -> None:
        self.group = group
        self._asked = asked
        self._init_timeout_s, self._share_gpus = settings.init_timeout_s, settings.share_gpus
        self.device = torch.device("cuda", torch.cuda.current_device())
        # Asked at each call, so without a function of torch's around them.
        self.is_recording: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
        self.stream_number: Callable[[], int] = partial(
            torch._C._cuda_getCurrentRawStream, self.device.index
        )
        properties = torch.cuda.get_device_properties(self.device)
        arch = properties.major * 10
        self.target = Target(
            "cuda",
            arch,
            num_sms=properties.multi_processor_count,
            shared_bytes=properties.shared_memory_per_block_optin,
            has_tma=arch >= 90,
        )
        self._meetings = StoreMeetings(
            dist.distributed_c10d._get_default_store(), dist.get_process_group_ranks(group),
            dist.get_rank(group), number=number, is_aborted=self.aborted,
        )  # fmt: skip
        self._driver = self.by_address = Driver()
        self._streams: dict[str, CudaStream] = {}
        self._capturing: torch.cuda.Stream | None = None
        self._recording: CudaRecording | None = None
        self._by_handle: dict[int, CudaStream] = {}
        self._abort: Any = None
        self._heaps: list[torch.Tensor | None] = []
        self._handles: list[Any] = []
        self._reserved: ReservedAddresses | None = None
        self.far: Far | None = None
        self.seats = Seats(dist.get_rank(group), (0,) * group.size(), (), ())
        self.seats = self._find_seats(nodes)
        self._open_shared()
        # A group's communicator is made at its first collective, which must not be a recorded one.
        if dist.get_backend(group) == "nccl":
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    # ---- memory

    def open_heap(self, nbytes: int, span_bytes: int) -> Sequence[torch.Tensor | None]:
        # Multicast is not used, and a program that maps it can take a host's GPUs out of service.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
        if self._share_gpus:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        has_far = len(set(self.seats.nodes)) > 1
        if has_far:
            nvshmem.choose(self.group)
        elif nvshmem.is_chosen():
            nvshmem.check_group(self.group)
        self._heaps = self._meet_with(self._new_memory(nbytes), self._meetings.name)
        if span_bytes > nbytes and not nvshmem.is_chosen():  # whose memory cannot be mapped again
            near, rank = [one is not None for one in self._heaps], self.seats.rank
            self._reserved = ReservedAddresses(self._driver, near, rank, self.device, span_bytes)
            self._reserved.map(0, self._heaps)
            self._heaps = self._reserved.tensors()
        if has_far:
            self.far = nvshmem.open_stage(self.device)
        own = self._heaps[self.seats.rank]
        assert own is not None
        self._bases = self._start_together(own.data_ptr())
        return self._heaps

    def grow_heap(self, offset: int, nbytes: int) -> bool:
        if self._reserved is None:
            return False
        try:
            memory = self._new_memory(nbytes)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            memory = None
        if not all(self.exchange(memory is not None, self._init_timeout_s)) or memory is None:
            return False
        self._reserved.map(offset, self._meet_with(memory, f"{self._meetings.name}/{offset}"))
        return True

    def _new_memory(self, nbytes: int) -> torch.Tensor:
        import torch.distributed._symmetric_memory as symmetric

        return symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _meet_with(self, memory: torch.Tensor, name: str) -> list[torch.Tensor | None]:
        """Every rank's memory, None where out of reach; `name` is no other meeting's."""
        import torch.distributed._symmetric_memory as symmetric

        if nvshmem.is_chosen():  # its ranks are all ranks, so they have met equally often
            handle = symmetric.rendezvous(memory, self.group.group_name)
        else:
            handle = rendezvous.meet(
                memory, store=self._meetings.store, name=name,
                rank=self.seats.rank, num_ranks=self.seats.num_ranks,
            )  # fmt: skip
        self._handles.append(handle)
        own = self.seats.nodes[self.seats.rank]
        return [
            memory
            if rank == self.seats.rank
            else handle.get_buffer(rank, (memory.numel(),), memory.dtype)
            if node == own
            else None
            for rank, node in enumerate(self.seats.nodes)
        ]

    def prepare(
        self, tensor: torch.Tensor, offset: int, name: str, *, zero: bool,
        axes: Callable[[], Axes] | None = None,
    ) -> None:  # fmt: skip
        if zero:
            tensor.zero_()
            torch.cuda.current_stream().synchronize()

    def release(self, tensor: torch.Tensor, offset: int) -> None:
        pass

    def local_words(self, values: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        words = torch.tensor(list(values), dtype=dtype, device=self.device)
        torch.cuda.current_stream().synchronize()
        return words

    def host_words(self, count: int, name: str) -> tuple[torch.Tensor, memoryview]:
        words = torch.zeros(count, dtype=torch.int64, pin_memory=True)
        return words, memoryview(words.numpy())

    # ---- meeting the other ranks on the host

    def exchange(self, value: Any, timeout_s: float) -> list[Any]:
        return self._meetings.exchange(
            value, timeout_s, "every rank must make the same collective calls in the same order"
        )

    def _start_together(self, value: Any) -> list[Any]:
        """Every rank's `value` while the world is made."""
        return self._meetings.exchange(value, self._init_timeout_s, LATE_AT_INIT)

    def call_logs(self) -> Sequence[memoryview | None]:
        own = self.seats.nodes[self.seats.rank]
        starts = map(self._call_log_start, range(self.seats.num_ranks))
        return [
            memoryview(self._shared)[start : start + CALL_LOG_BYTES] if node == own else None
            for start, node in zip(starts, self.seats.nodes, strict=True)
        ]

    # ---- launches, streams and copies

    def load(self, kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        from weft.language import triton_api

        return triton_api.load_kernel(kernel, *arguments, **options)

    def current_stream(self) -> Stream:
        # By its number: torch takes five microseconds to make an object of it.
        known = self._by_handle.get(self.stream_number())
        if known is None:
            stream = torch.cuda.current_stream()
            known = self._by_handle[stream.cuda_stream] = CudaStream("current", stream)
        return known

    def wait_for(self, other: Stream) -> None:
        is_captured = torch.cuda.is_current_stream_capturing()
        with other:
            other_is_captured = torch.cuda.is_current_stream_capturing()
        if is_captured == other_is_captured:
            self.current_stream().wait(other)

    def stream(self, name: str) -> Stream:
        if name not in self._streams:
            # High priority: such streams feed the compute stream and must not queue behind it.
            stream = CudaStream(name, torch.cuda.Stream(self.device, priority=-1))
            self._streams[name] = self._by_handle[stream.torch.cuda_stream] = stream
        return self._streams[name]

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._check_captured()
        if self._recording is not None:
            for address in (dst.data_ptr(), src.data_ptr()):
                if not self._lies_on_heap(address):
                    self._recording.add_copied(address)
        if dst.is_contiguous() and src.is_contiguous():
            dst.copy_(src, non_blocking=True)
            return
        self._driver.copy_2d(dst, src, torch.cuda.current_stream().cuda_stream)

    def _lies_on_heap(self, address: int) -> bool:
        """In memory that lives as long as this does, own or a peer's."""
        heaps = (heap for heap in self._heaps if heap is not None)
        return any(0 <= address - heap.data_ptr() < heap.nbytes for heap in heaps)

    def _check_captured(self) -> None:
        if self._recording is not None and not torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a copy was queued on a stream that is not recorded, while others are: it would "
                "run now and never again; let its stream wait for the one that was current first"
            )

    def copy_word(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._check_captured()
        dst.copy_(src, non_blocking=True)

    def take_token(self, word: torch.Tensor) -> None:
        from weft.language import triton_api

        if triton_api.launches_are_held():
            return  # the kernel that sets it is left out, and the stream would wait for ever
        self._check_captured()
        self._driver.take_token(word.data_ptr(), torch.cuda.current_stream().cuda_stream)

    def record(self) -> AbstractContextManager[Recording]:
        return self._record()

    @contextmanager
    def _record(self) -> Iterator[CudaRecording]:
        recording = CudaRecording()
        # Other threads (the watchdog, a data loader) go on with their own CUDA calls.
        with torch.cuda.graph(recording.graph, capture_error_mode="thread_local"):
            self._begin_life(recording)
            yield recording
        CudaRecording._dying.clear()

    def record_launches(self, launch: Callable[[], None]) -> CudaRecording:
        """Record what `launch` queues; without the pause that torch makes before a capture."""
        self._recording = recording = CudaRecording(self._driver.allocation_of)
        if self._capturing is None:
            # Of ordinary priority: kernels keep in the recording what their stream has.
            self._capturing = torch.cuda.Stream(self.device)
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        with torch.cuda.stream(self._capturing):
            recording.graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._begin_life(recording)
                launch()
            finally:
                self._recording = None
                recording.graph.capture_end()
        CudaRecording._dying.clear()
        recording.device_bytes = max(0, free_bytes - torch.cuda.mem_get_info(self.device)[0])
        return recording

    def _begin_life(self, recording: CudaRecording) -> None:
        life = RecordingLife(weakref.ref(recording))
        self._driver.begin_life(torch.cuda.current_stream().cuda_stream, life)

    def recorded_life(self) -> Life:
        return self._driver.life_of_capture(torch.cuda.current_stream().cuda_stream)

    def drain(self) -> None:
        torch.cuda.synchronize(self.device)

    # ---- trouble

    def aborted(self) -> bool:
        return self._abort is not None and self._abort[0] != 0

    def abort(self) -> None:
        self._abort[0] = 1

    def reports(self) -> Sequence[WaitReport]:
        return [
            report
            for rank in range(self.seats.num_ranks)
            for report in read_reports(self._report_words(rank))
        ]

    def heap_base(self, rank: int) -> int:
        return self._bases[rank]

    def close(self) -> None:
        self._heaps, self._handles, self._reserved = [], [], None
        torch.cuda.cudart().cudaHostUnregister(self._shared_address)

    # ---- how it starts

    def _find_seats(self, nodes: int | Sequence[int] | None) -> Seats:
        """Where each rank sits: a node for each host, or as declared."""
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = file.read().strip()
        mine = (host, self.device.index, dist.get_rank(), self._asked)
        everyone = self._start_together(mine)
        check_names([asked for *_, asked in everyone], self._meetings.members)
        if len({seat[:2] for seat in everyone}) < len(everyone) and not self._share_gpus:
            devices = ", ".join(f"rank {r}: cuda:{d}" for r, (_, d, *_) in enumerate(everyone))
            raise UsageError(
                f"several ranks use one GPU ({devices}); call torch.cuda.set_device(local rank) "
                "before weft.init; to try ranks that take turns on one GPU set WEFT_SHARE_GPUS=1"
            )
        hosts = [seat[0] for seat in everyone]
        numbers = numbered_nodes(hosts, nodes)
        return Seats(
            dist.get_rank(self.group),
            numbers,
            tuple(numbers[:rank].count(node) for rank, node in enumerate(numbers)),
            tuple(seat[2] for seat in everyone),
        )

    def _open_shared(self) -> None:
        """Map one block into every rank and GPU of the node; its file is gone once all have it."""
        n, rank = self.seats.num_ranks, self.seats.rank
        first = self.seats.nodes.index(self.seats.nodes[rank])
        nbytes = PAGE_BYTES + n * (layout.REPORT_BYTES + CALL_LOG_BYTES)
        nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        path = os.path.join(folder, f"weft-{uuid.uuid4().hex}")
        if rank == first:
            with open(path, "xb") as file:
                file.truncate(nbytes)
        path = self._start_together(path)[first]
        with open(path, "r+b") as file:
            self._shared = mmap.mmap(file.fileno(), nbytes)
        self._start_together("mapped")
        if rank == first:
            os.unlink(path)
        self._shared_address = torch.frombuffer(self._shared, dtype=torch.uint8).data_ptr()
        code = torch.cuda.cudart().cudaHostRegister(
            self._shared_address, nbytes, REGISTER_PORTABLE_AND_MAPPED
        )
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister of {nbytes} bytes failed with {code}")
        self._abort = memoryview(self._shared)[:4].cast("i")
        self._bases: list[int] = []
        self.abort_address = self._shared_address
        self.report_address = self._shared_address + self._report_start(rank)

    def _report_start(self, rank: int) -> int:
        return PAGE_BYTES + rank * layout.REPORT_BYTES

    def _call_log_start(self, rank: int) -> int:
        start = PAGE_BYTES + self.seats.num_ranks * layout.REPORT_BYTES
        return start + rank * CALL_LOG_BYTES

    def _report_words(self, rank: int) -> memoryview:
        start = self._report_start(rank)
        return memoryview(self._shared)[start : start + layout.REPORT_BYTES].cast("q")


def scope() -> None:
    """One process is one rank: worlds differ by name alone."""
    return None


# By a group's members: worlds of theirs that were made here so far.
_numbers: dict[tuple[int, ...], int] = {}


def connect(
    group: dist.ProcessGroup | None,
    settings: Settings,
    *,
    name: str,
    asked: str,
    nodes: int | Sequence[int] | None = None,
) -> CudaBackend:
    """The backend of this process in `group`; starts the default group where there is none.

    `asked` is how the world was asked to be called; `nodes` declares which ranks share one, as
    weft.emulated does; else hosts are nodes.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "weft.init found no GPU; run the script with `weft emulate SCRIPT.py --ranks N`, or "
            "inside `with weft.emulated(ranks=N) as ranks: ranks.run(main)`"
        )
    if not dist.is_initialized():
        _start_processes(settings)
    group = group if group is not None else dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(group))
    number = _numbers.get(members, 0)
    backend = CudaBackend(group, settings, asked=asked, number=number, nodes=nodes)
    # One that was not made is not counted: who calls again meets those that come later.
    _numbers[members] = number + 1
    return backend


def check_names(asked: Sequence[str], members: Sequence[int]) -> None:
    """Raises  CallOrderError: ranks of one group that meet in different worlds"""
    for rank, name in zip(members, asked, strict=True):
        if name != asked[0]:
            raise CallOrderError(
                f"weft.init on the group {list(members)}: rank {members[0]} makes the world "
                f"{asked[0]!r}, but rank {rank} makes {name!r}; every member of a group must make "
                "its worlds in the same order, with the same names"
            )


def numbered_nodes(hosts: Sequence[str], declared: int | Sequence[int] | None) -> tuple[int, ...]:
    """Each rank's node, numbered as they come.

    Raises  UsageError: a declared node whose ranks are on several hosts
    """
    if declared is None:
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        return tuple(numbers[host] for host in hosts)
    topology = Topology.of(len(hosts), declared)
    nodes = tuple(topology.seat(rank).node for rank in range(len(hosts)))
    pairs = set(zip(nodes, hosts, strict=True))
    if len(pairs) > topology.num_nodes:
        raise UsageError(
            f"nodes={topology} puts ranks of different hosts on one node; a node is a part of one "
            "host: leave nodes out, and each host is one"
        )
    return nodes


def _start_processes(settings: Settings) -> None:
    """The default process group, as a launcher's environment says; alone without a launcher."""
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if settings.share_gpus:
        index %= torch.cuda.device_count()
    torch.cuda.set_device(index)
    if "RANK" in os.environ:
        store, rank, num_ranks = meet_processes(settings.init_timeout_s)
    else:
        store, rank, num_ranks = dist.HashStore(), 0, 1
    # NCCL takes one rank of a GPU.
    dist.init_process_group(
        "gloo" if settings.share_gpus else "nccl", store=store, rank=rank, world_size=num_ranks,
        device_id=None if settings.share_gpus else torch.device("cuda", index),
        timeout=timedelta(minutes=10),
    )  # fmt: skip
    atexit.register(leave)


def leave() -> None:
    """End what `init_process_group` began. Else a thread of torch's that watches NCCL may ask the
    driver while it shuts down, and abort the process. Not behind an exception: others may be gone,
    who would be waited for."""
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        dist.destroy_process_group()


def meet_processes(timeout_s: float) -> tuple[Any, int, int]:
    """The store of all processes that a launcher has started, once all are there; this one's rank,
    and how many there are.

    Raises  TimeoutError: naming those that did not come; NCCL alone would wait ten minutes
    """
    try:
        store, rank, num_ranks = next(
            iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        )
    except dist.DistStoreError as error:
        raise TimeoutError(
            f"rank {os.environ['RANK']} of {os.environ.get('WORLD_SIZE')} has not met the others "
            f"in {timeout_s:g} s: {error}; {LATE_AT_INIT}"
        ) from error
    StoreMeetings(dist.PrefixStore("weft start", store), range(num_ranks), rank).exchange(
        "started", timeout_s, LATE_AT_INIT
    )
    store.set_timeout(timedelta(minutes=10))
    return dist.PrefixStore("default_pg", store), rank, num_ranks
