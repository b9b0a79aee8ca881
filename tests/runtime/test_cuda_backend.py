"""What the backend for NVIDIA GPUs does of which no GPU is needed to be sure."""

from __future__ import annotations

import ctypes
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from weft.language import triton_api
from weft.runtime.backend import RecordingLife
from weft.runtime.backends.cuda import CudaBackend, CudaRecording, leave
from weft.runtime.backends.cuda_driver import Driver
from weft.runtime.backends.reserved_addresses import ReservedAddresses
from weft.runtime.heap import GRANULE_BYTES, HeapAllocator, Wanted


def test_no_stream_waits_for_a_token_of_launches_that_are_left_out(monkeypatch):
    queued: list[tuple] = []
    backend = CudaBackend.__new__(CudaBackend)
    backend._driver = SimpleNamespace(take_token=lambda *given: queued.append(given))
    backend._recording = None
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    word = torch.zeros(1, dtype=torch.int64)
    with triton_api.held_launches():
        backend.take_token(word)
    assert not queued
    backend.take_token(word)
    assert queued == [(word.data_ptr(), 7)]


def test_a_recording_is_of_the_allocations_that_its_copies_name(monkeypatch):
    """Not of the heap's, which stay; what has no number is taken for another one each time."""
    heap, mine, other = (torch.zeros(64) for _ in range(3))
    numbers = {mine.data_ptr(): 5, other.data_ptr(): 0}
    backend = CudaBackend.__new__(CudaBackend)
    backend._heaps = [None, heap]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    backend._recording = recording = CudaRecording(lambda address: numbers[address])
    backend.copy(heap[8:16], mine[:8])
    assert recording.copied == {5: mine.data_ptr()} and recording.is_current
    numbers[mine.data_ptr()] = 6
    assert not recording.is_current
    numbers[mine.data_ptr()] = 5
    backend.copy(other, heap)
    assert not recording.is_current
    capturing[0] = False
    for queue in (backend.copy, backend.copy_word):
        with pytest.raises(RuntimeError, match="on a stream that is not recorded"):
            queue(other, heap)


# What a driver is made of beside what a test looks at.
OTHERS = (
    "cuMemcpy2DAsync_v2", "cuMemcpyAsync", "cuStreamBatchMemOp_v2", "cuPointerGetAttribute",
)  # fmt: skip


class Graphs:
    """CUDA graphs as the driver's calls make them, of one stream."""

    def __init__(self) -> None:
        self.number = 0
        self.objects: dict[int, tuple[int, int]] = {}
        self.held: dict[int, list[int]] = {}

    def destroy(self, number: int) -> None:
        for held in self.held.pop(number):
            pointer, destructor = self.objects.pop(held)
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destructor)(pointer)

    def library(self) -> SimpleNamespace:
        def info(stream, status, number, graph, dependencies, count):
            status._obj.value = int(self.number > 0)
            number._obj.value, graph._obj.value = self.number, 100 + self.number
            return 0

        def create(out, pointer, destructor, count, flags):
            assert (count, flags) == (1, 1)
            out._obj.value = 1000 + len(self.objects)
            self.objects[out._obj.value] = (pointer, destructor)
            return 0

        def retain(graph, held, count, flags):
            assert (count, flags) == (1, 1)
            self.held.setdefault(graph.value - 100, []).append(held.value)
            return 0

        return SimpleNamespace(
            cuStreamGetCaptureInfo_v2=info, cuUserObjectCreate=create,
            cuGraphRetainUserObject=retain,
        )  # fmt: skip


def test_a_graph_that_is_destroyed_says_so(monkeypatch):
    monkeypatch.setattr(Driver, "_lives", {})
    graphs = Graphs()
    others = {name: SimpleNamespace() for name in OTHERS}
    driver = Driver(SimpleNamespace(**vars(graphs.library()), **others))
    with pytest.raises(RuntimeError, match="stream 0x7 is not captured"):
        driver.life_of_capture(7)
    graphs.number = 1
    first = driver.life_of_capture(7)
    assert driver.life_of_capture(7) is first and len(graphs.objects) == 1
    graphs.number = 2
    second = driver.life_of_capture(7)
    assert not first.is_over and not second.is_over
    graphs.destroy(1)
    assert first.is_over and first.is_over and not second.is_over
    graphs.number = 3
    driver.life_of_capture(7)
    # One of weft's own says itself when it is gone, and holds nothing for it.
    graphs.number, num_objects = 4, len(graphs.objects)
    recording = Graphs()
    driver.begin_life(7, own := RecordingLife(weakref.ref(recording)))
    assert driver.life_of_capture(7) is own and len(graphs.objects) == num_objects
    assert not own.is_over
    del recording
    assert own.is_over
    graphs.number = 5
    driver.life_of_capture(7)
    assert sorted(driver._lives) == [2, 3, 5]


def test_what_the_driver_is_asked_for():
    """Rows of a matrix as a rectangle; a wait and a write as one call; what fails in its words."""
    called: list[tuple] = []

    def copy_2d(rectangle, stream):
        one = rectangle._obj
        called.append((one.src_pitch, one.dst_pitch, one.width_bytes, one.height, stream))
        return 0

    def memory_operations(stream, count, both, flags):
        told = [(one.operation, one.address, one.value, one.flags) for one in both._obj]
        called.append((stream, count, told, flags))
        return 700

    def attribute(number, which, address):
        number._obj.value = 40 + address
        return int(address == 3)

    def say(code, text):
        text._obj.value = b"illegal address"

    driver = Driver(
        SimpleNamespace(
            cuMemcpy2DAsync_v2=copy_2d,
            cuMemcpyAsync=lambda *given: called.append(given) or 0,
            cuStreamBatchMemOp_v2=memory_operations,
            cuPointerGetAttribute=attribute,
            cuGetErrorString=say,
            **vars(Graphs().library()),
        )  # fmt: skip
    )
    driver.copy_2d(torch.zeros(3, 8)[:, :5], torch.zeros(3, 16)[:, :5], 7)
    driver.copy(1 << 40, 96, 24, 7)
    with pytest.raises(RuntimeError, match="cuStreamBatchMemOp_v2 failed with 700: illegal"):
        driver.take_token(64, 7)
    assert called[:2] == [(64, 32, 20, 3, 7), (1 << 40, 96, 24, 7)]
    assert called[2:] == [(7, 2, [(4, 64, 1, 1), (5, 64, 0, 0)], 0)]
    assert driver.allocation_of(2) == 42 and driver.allocation_of(3) == 0


class VirtualMemory:
    """The driver's virtual memory: ranges of addresses, and what is mapped where."""

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        # By address: which memory, and its size.
        self.mapped: dict[int, tuple[int, int]] = {}
        self.retained: list[int] = []
        self.accessible: dict[int, tuple[int, int, int]] = {}

    def library(self) -> SimpleNamespace:
        def reserve(out, size, alignment, wanted, flags):
            out._obj.value = start = 1 << 40 | len(self.reserved) << 36
            self.reserved[start] = size
            return 0

        def address_range(base, size, address):
            base._obj.value, size._obj.value = address, self.mapped[address][1]
            return 0

        def retain(out, address):
            out._obj.value = self.mapped[address][0]
            self.retained.append(out._obj.value)
            return 0

        def map(address, size, offset, handle, flags):
            start = max(one for one in self.reserved if one <= address)
            assert address + size <= start + self.reserved[start] and handle in self.retained
            assert not any(one < address + size and address < one + its[1]
                           for one, its in self.mapped.items())  # fmt: skip
            self.mapped[address] = (handle, size)
            return 0

        def access(address, size, described, count):
            assert self.mapped[address][1] == size and count == 1
            one = described._obj
            self.accessible[address] = (one.kind, one.device, one.flags)
            return 0

        return SimpleNamespace(
            cuMemAddressReserve=reserve,
            cuMemGetAddressRange_v2=address_range,
            cuMemRetainAllocationHandle=retain,
            cuMemMap=map,
            cuMemSetAccess=access,
            cuMemRelease=lambda handle: self.retained.remove(handle) or 0,
            cuMemUnmap=lambda address, size: 0 * len([self.mapped.pop(address)]),
            cuMemAddressFree=lambda start, size: 0 * len([self.reserved.pop(start)]),
        )


def test_a_heap_that_grows_is_mapped_at_one_offset_of_every_ranks_addresses():
    memory = VirtualMemory()
    others = {name: SimpleNamespace() for name in OTHERS}
    library = {**vars(Graphs().library()), **vars(memory.library()), **others}
    driver = Driver(SimpleNamespace(**library))
    there = ReservedAddresses(driver, [True, True, False], 1, torch.device("cuda", 5), 1 << 30)
    assert len(memory.reserved) == 2 and there.starts[2] == 0
    heap = HeapAllocator(3 << 20, limit_bytes=64 << 20)
    pieces = []
    for number, (offset, nbytes) in enumerate(
        [(0, 3 << 20), heap.next_segment([Wanted(20 << 20, "large")])]
    ):
        # torch's own memory is larger, by its signal pad, and ends where a granule does.
        size = (nbytes // GRANULE_BYTES + (number == 0) + 1) * GRANULE_BYTES
        for rank in range(2):
            memory.mapped[(number * 2 + rank + 1) << 32] = (10 * number + rank, size)
        addresses = [(number * 2 + rank + 1) << 32 for rank in range(2)]
        pieces = [SimpleNamespace(data_ptr=lambda at=at: at) for at in addresses]
        there.map(offset, [*pieces, None])
        for rank in range(2):
            address = there.starts[rank] + offset
            assert memory.mapped[address] == (10 * number + rank, size)
            assert memory.accessible[address] == (1, 5, 3)
    assert not memory.retained and there.__cuda_array_interface__["data"][0] == there.starts[1]
    del there
    assert not memory.reserved and len(memory.mapped) == 4, "what torch has mapped stays"


@pytest.mark.parametrize("fails", [False, True])
def test_scripts_that_end_well_end_the_default_group_that_a_world_made(fails, monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if fails:
        monkeypatch.setattr(sys, "last_type", ValueError, raising=False)
    else:
        monkeypatch.delattr(sys, "last_type", raising=False)
    try:
        leave()
        assert dist.is_initialized() == fails
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    leave()  # where the script has done so
