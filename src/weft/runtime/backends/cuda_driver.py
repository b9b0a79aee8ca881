"""The calls of NVIDIA's driver that torch has no word for; nothing to build or install.

Source  CUDA driver API: cuMemcpy2DAsync, cuStreamBatchMemOp, cuPointerGetAttribute,
        cuStreamGetCaptureInfo, cuUserObjectCreate, cuGraphRetainUserObject
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

MEMORY_UNIFIED = 4
WAIT_VALUE_64, WRITE_VALUE_64, WAIT_VALUE_EQUAL = 4, 5, 1
POINTER_BUFFER_ID = 7
IS_CAPTURING = 1
USER_OBJECT_NO_SYNC, GRAPH_TAKES_REFERENCE = 1, 1
# glibc's sem_t has 32.
SEMAPHORE_BYTES = 64


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D_v2."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_kind", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_kind", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


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
    own, at any time, where Python may not run. The semaphore is not freed before that.
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

    def __init__(self, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libcuda.so.1")
        pointer = ctypes.c_uint64
        self._copy_2d = self._call("cuMemcpy2DAsync_v2", ctypes.c_void_p, pointer)
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
        # By the capture's number, of graphs that may still exist.
        self._lives: dict[int, GraphLife] = {}

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor, stream: int) -> None:
        """Both are 2-D with unit inner stride."""
        size = dst.element_size()
        rectangle = _Copy2D(
            src_kind=MEMORY_UNIFIED,
            src_device=src.data_ptr(),
            src_pitch=src.stride(0) * size,
            dst_kind=MEMORY_UNIFIED,
            dst_device=dst.data_ptr(),
            dst_pitch=dst.stride(0) * size,
            width_bytes=dst.shape[1] * size,
            height=dst.shape[0],
        )
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

    def life_of_capture(self, stream: int) -> GraphLife:
        """Of the graph that the stream is captured into; the same one each time."""
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        found = (ctypes.byref(one) for one in (status, number, graph))
        self._capture_info(stream, *found, None, None)
        if status.value != IS_CAPTURING:
            raise RuntimeError(f"stream {stream:#x} is not captured (status {status.value})")
        if number.value not in self._lives:
            self._lives = {of: life for of, life in self._lives.items() if not life.is_over}
            self._lives[number.value] = life = GraphLife()
            held = ctypes.c_void_p()
            self._new_object(
                ctypes.byref(held), life.semaphore, life.destructor, 1, USER_OBJECT_NO_SYNC
            )
            self._retain_object(graph, held, 1, GRAPH_TAKES_REFERENCE)
        return self._lives[number.value]

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
