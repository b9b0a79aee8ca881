"""The calls of NVIDIA's driver that torch has no word for; nothing to build or install.

Source  CUDA driver API: cuMemcpy2DAsync, cuStreamBatchMemOp, cuPointerGetAttribute,
        cuStreamGetCaptureInfo, cuUserObjectCreate, cuGraphRetainUserObject; of virtual memory
        cuMemAddressReserve, cuMemRetainAllocationHandle, cuMemMap, cuMemSetAccess
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from weft.runtime.backend import Life

MEMORY_UNIFIED = 4
WAIT_VALUE_64, WRITE_VALUE_64, WAIT_VALUE_EQUAL = 4, 5, 1
POINTER_BUFFER_ID = 7
IS_CAPTURING = 1
USER_OBJECT_NO_SYNC, GRAPH_TAKES_REFERENCE = 1, 1
LOCATION_DEVICE, READ_AND_WRITE = 1, 3
# glibc's sem_t has 32.
SEMAPHORE_BYTES = 64


# Of parameters: what the driver writes to, device addresses and handles, sizes.
_POINTER, _ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t


# Of either side of a copy.
_SIDE = (
    ("x", _SIZE), ("y", _SIZE), ("kind", ctypes.c_uint), ("host", _POINTER), ("device", _ADDRESS),
    ("array", _POINTER), ("pitch", _SIZE),
)  # fmt: skip


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D_v2."""

    _fields_ = (
        *((f"{side}_{name}", kind) for side in ("src", "dst") for name, kind in _SIDE),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc of a device."""

    _fields_ = (("kind", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_uint))


class _MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams of a wait or a write."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


class GraphLife:
    """Tells when a CUDA graph, and all that was instantiated from it, is destroyed.

    The graph holds a user object whose destructor is sem_post: CUDA calls it from a thread of its
    own, at any time, where Python may not run. The semaphore is not freed before that. A graph that
    holds one takes 1.4 us longer at each replay (H200), so weft's own have none.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.calloc.restype = ctypes.c_void_p
        self._semaphore = ctypes.c_void_p(self._libc.calloc(1, SEMAPHORE_BYTES))
        self._libc.sem_init(self._semaphore, 0, 0)
        self._is_over = False

    @property
    def semaphore(self) -> int:
        return self._semaphore.value or 0

    @property
    def destructor(self) -> int:
        """The address of what the graph calls with the semaphore."""
        return ctypes.cast(self._libc.sem_post, ctypes.c_void_p).value or 0

    @property
    def is_over(self) -> bool:
        if not self._is_over and self._libc.sem_trywait(self._semaphore) == 0:
            self._is_over = True
            self._libc.free(self._semaphore)
        return self._is_over


class Driver:
    """`library` is the driver's own where none is given. A stream is its handle.

    Raises  RuntimeError: a call that fails, with the driver's words
    """

    # By the capture's number, which tells captures of a process apart: of graphs that may exist.
    _lives: ClassVar[dict[int, Life]] = {}

    def __init__(self, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libcuda.so.1")
        pointer = ctypes.c_uint64
        self._copy_2d = self._call("cuMemcpy2DAsync_v2", ctypes.c_void_p, pointer)
        self._copy = self._call("cuMemcpyAsync", _ADDRESS, _ADDRESS, _SIZE, pointer)
        self._memory_operations = self._call(
            "cuStreamBatchMemOp_v2", pointer, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint
        )
        self._attribute = self._library.cuPointerGetAttribute
        self._attribute.argtypes = (ctypes.c_void_p, ctypes.c_int, pointer)
        anything = ctypes.c_void_p
        self._capture_info = self._call("cuStreamGetCaptureInfo_v2", pointer, *[anything] * 5)
        self._new_object = self._call(
            "cuUserObjectCreate", anything, anything, anything, ctypes.c_uint, ctypes.c_uint
        )
        self._retain_object = self._call(
            "cuGraphRetainUserObject", anything, anything, ctypes.c_uint, ctypes.c_uint
        )

    def handle(self, stream: Any) -> int:
        """Of one of the backend's streams."""
        return stream.torch.cuda_stream

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Bytes from one address to another, of this device or a peer."""
        self._copy(dst, src, nbytes, stream)

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor, stream: int) -> None:
        """Both are 2-D with unit inner stride."""
        size, (rows, columns) = dst.element_size(), dst.shape
        pitches = dst.stride(0) * size, src.stride(0) * size
        self.copy_rows(dst.data_ptr(), src.data_ptr(), (rows, columns * size), pitches, stream)

    def copy_rows(
        self, dst: int, src: int, extent: Sequence[int], pitches: Sequence[int], stream: int
    ) -> None:
        """So many rows of so many bytes, `pitches` bytes apart at dst and at src."""
        rectangle = _Copy2D(
            src_kind=MEMORY_UNIFIED, src_device=src, src_pitch=pitches[1],
            dst_kind=MEMORY_UNIFIED, dst_device=dst, dst_pitch=pitches[0],
            height=extent[0], width_bytes=extent[1],
        )  # fmt: skip
        self._copy_2d(ctypes.byref(rectangle), stream)

    def take_token(self, address: int, stream: int) -> None:
        """The stream waits until the int64 there is 1, and sets it to 0."""
        # By default the write has a fence.
        both = (_MemoryOperation * 2)(
            _MemoryOperation(WAIT_VALUE_64, address, 1, WAIT_VALUE_EQUAL),
            _MemoryOperation(WRITE_VALUE_64, address, 0, 0),
        )
        self._memory_operations(stream, len(both), ctypes.byref(both), 0)

    def allocation_of(self, address: int) -> int:
        """A number that no other allocation of this process ever has; 0 where it has none."""
        number = ctypes.c_uint64(0)
        code = self._attribute(ctypes.byref(number), POINTER_BUFFER_ID, address)
        return 0 if code else number.value

    def reserve(self, nbytes: int) -> int:
        """Addresses without memory."""
        start = ctypes.c_uint64()
        kinds = (_POINTER, _SIZE, _SIZE, _ADDRESS, _ADDRESS)
        self._call("cuMemAddressReserve", *kinds)(ctypes.byref(start), nbytes, 0, 0, 0)
        return start.value

    def unreserve(self, start: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", _ADDRESS, _SIZE)(start, nbytes)

    def map_again(self, address: int, there: int, device: int) -> int:
        """The mapping that begins at `address` is at `there` too, where the device may read and
        write it; its bytes. The memory lives as long as either."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
        self._call("cuMemGetAddressRange_v2", _POINTER, _POINTER, _ADDRESS)(
            ctypes.byref(base), ctypes.byref(size), address
        )
        if base.value != address:
            raise RuntimeError(f"the mapping at {address:#x} begins at {base.value:#x}")
        retain = self._call("cuMemRetainAllocationHandle", _POINTER, _ADDRESS)
        retain(ctypes.byref(handle), address)
        try:
            kinds = (_ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS)
            self._call("cuMemMap", *kinds)(there, size.value, 0, handle.value, 0)
        finally:
            self._call("cuMemRelease", _ADDRESS)(handle.value)
        access = _Access(LOCATION_DEVICE, device, READ_AND_WRITE)
        self._call("cuMemSetAccess", _ADDRESS, _SIZE, _POINTER, _SIZE)(
            there, size.value, ctypes.byref(access), 1
        )
        return size.value

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", _ADDRESS, _SIZE)(address, nbytes)

    def life_of_capture(self, stream: int) -> Life:
        """Of the graph that the stream is captured into; the same one each time."""
        number, graph = self._capture(stream)
        if number not in self._lives:
            life = GraphLife()
            self._remember(number, life)
            held = ctypes.c_void_p()
            self._new_object(
                ctypes.byref(held), life.semaphore, life.destructor, 1, USER_OBJECT_NO_SYNC
            )
            self._retain_object(graph, held, 1, GRAPH_TAKES_REFERENCE)
        return self._lives[number]

    def begin_life(self, stream: int, life: Life) -> None:
        """The graph that the stream is captured into ends with `life`."""
        self._remember(self._capture(stream)[0], life)

    def _capture(self, stream: int) -> tuple[int, ctypes.c_void_p]:
        """The number of the stream's capture, and its graph."""
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        found = (ctypes.byref(one) for one in (status, number, graph))
        self._capture_info(stream, *found, None, None)
        if status.value != IS_CAPTURING:
            raise RuntimeError(f"stream {stream:#x} is not captured (status {status.value})")
        return number.value, graph

    def _remember(self, number: int, life: Life) -> None:
        for other in [other for other, one in self._lives.items() if one.is_over]:
            del self._lives[other]
        self._lives[number] = life

    def _call(self, name: str, *kinds: Any) -> Any:
        function = getattr(self._library, name)
        function.argtypes = kinds
        function.restype = ctypes.c_int

        def call(*args: Any) -> None:
            if code := function(*args):
                text = ctypes.c_char_p()
                self._library.cuGetErrorString(code, ctypes.byref(text))
                raise RuntimeError(f"{name} failed with {code}: {(text.value or b'?').decode()}")

        return call
