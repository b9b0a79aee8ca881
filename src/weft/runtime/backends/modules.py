"""Binaries that are here already, loaded and launched through the driver: no compiler, nothing to
build. NVIDIA's driver and HIP's, which have the same calls under other names.

Source  CUDA driver API: cuModuleLoadData, cuModuleGetFunction, cuFuncSetAttribute, cuLaunchKernel,
        cuLaunchCooperativeKernel, cuTensorMapEncodeTiled; HIP: hipModuleLoadData, ...
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

# Triton's words for what a kernel takes by value, and how wide they are.
NUMBERS = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32,
    "i64": ctypes.c_int64, "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
# Behind all others a kernel takes addresses of Triton's own scratch memory, of which we give none.
SCRATCH = 2
# More shared memory than this a kernel must ask for (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE..).
USUAL_SHARED_BYTES, MOST_DYNAMIC_SHARED = 48 << 10, 8
INVALID_CONTEXT = 201
# Of a tensor map: its bytes, at which multiples it begins, and what Triton's launcher asks for.
MAP_BYTES, MAP_ALIGN = 128, 64
NO_INTERLEAVE, PROMOTION_128B = 0, 2
_POINTER, _UINT = ctypes.c_void_p, ctypes.c_uint
_LAUNCH = (_POINTER, *[_UINT] * 7, _POINTER, _POINTER)


class Binary(NamedTuple):
    """One function of a binary, and what each of its programs takes.

    Units   shared_bytes: of one program; threads: of it
    """

    code: bytes
    function: str
    threads: int
    shared_bytes: int
    cooperative: bool


class Names(NamedTuple):
    """What a driver's library and its calls are called; "" where there is no such call."""

    library: str
    load: str
    function: str
    attribute: str
    launch: str
    cooperative: str
    error: str
    encode: str


DRIVERS = {
    "cuda": Names(
        "libcuda.so.1", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute",
        "cuLaunchKernel", "cuLaunchCooperativeKernel", "cuGetErrorString",
        "cuTensorMapEncodeTiled",
    ),
    # AMD's kernels take all of their shared memory unasked, and there is no TMA.
    "hip": Names(
        "libamdhip64.so", "hipModuleLoadData", "hipModuleGetFunction", "", "hipModuleLaunchKernel",
        "hipModuleLaunchCooperativeKernel", "hipDrvGetErrorString", "",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Descriptor:
    """A tensor as TMA reads it, but for its address: as Triton's compiler asked for it.

    Shapes  shape and strides by elements, the last stride 1; block: what is read at once
    Units   element_bytes: bytes; kind: CUtensorMapDataType; swizzle: CUtensorMapSwizzle
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    kind: int
    element_bytes: int
    swizzle: int
    fills_with_nan: bool


class Modules:
    """A driver's. `library` is its own where none is given.

    Raises  RuntimeError: a call that fails, with the driver's words
    """

    def __init__(self, backend: str = "cuda", library: Any = None) -> None:
        self.names = DRIVERS[backend]
        self._library = library or ctypes.CDLL(self.names.library)
        self._launch = self._of(self.names.launch, *_LAUNCH, _POINTER)
        # HIP's takes no `extra`.
        self._cooperative = self._of(self.names.cooperative, *_LAUNCH)
        self._functions: dict[tuple[bytes, str, Any], int] = {}

    def function(self, binary: Binary, device: Any) -> int:
        """The function's handle, loaded once for each device. CUDA loads while nothing runs: load
        all of what waits for each other before any of it is launched."""
        key = (binary.code, binary.function, device)
        found = self._functions.get(key)
        if found is None:
            module, function = _POINTER(), _POINTER()
            self._call(self.names.load, ctypes.byref(module), binary.code)
            name = binary.function.encode()
            self._call(self.names.function, ctypes.byref(function), module, name)
            if self.names.attribute and binary.shared_bytes > USUAL_SHARED_BYTES:
                size = ctypes.c_int(binary.shared_bytes)
                attribute = ctypes.c_int(MOST_DYNAMIC_SHARED)
                self._call(self.names.attribute, function, attribute, size)
            found = self._functions[key] = function.value or 0
        return found

    def launch(
        self, binary: Binary, function: int, grid: Sequence[int], places: Any, stream: int
    ) -> None:
        """One launch; `places` is an array of the addresses of the kernel's arguments."""
        shape = (*grid, binary.threads, 1, 1, binary.shared_bytes, stream, places)
        given = (function, *shape) if binary.cooperative else (function, *shape, None)
        launch = self._cooperative if binary.cooperative else self._launch
        code = launch(*given)
        if code == INVALID_CONTEXT:  # a thread that has not used the device yet
            torch.cuda.mem_get_info()
            code = launch(*given)
        self._check(self.names.cooperative if binary.cooperative else self.names.launch, code)

    def encode(self, descriptor: Descriptor, address: int) -> Any:
        """The tensor map of a descriptor at an address: memory that is as long as it is held, of
        which the map is what `ctypes.addressof` gives."""
        rank = len(descriptor.block)
        strides = [one * descriptor.element_bytes for one in descriptor.strides[:-1]]
        memory = (ctypes.c_char * (MAP_BYTES + MAP_ALIGN))()
        begin = -ctypes.addressof(memory) % MAP_ALIGN
        found = (ctypes.c_char * MAP_BYTES).from_buffer(memory, begin)
        # The driver has the innermost extent first.
        self._call(
            self.names.encode, ctypes.byref(found), ctypes.c_int(descriptor.kind), _UINT(rank),
            _POINTER(address), (ctypes.c_uint64 * rank)(*reversed(descriptor.shape)),
            (ctypes.c_uint64 * rank)(*reversed(strides)),
            (_UINT * rank)(*reversed(descriptor.block)), (_UINT * rank)(*[1] * rank),
            ctypes.c_int(NO_INTERLEAVE), ctypes.c_int(descriptor.swizzle),
            ctypes.c_int(PROMOTION_128B), ctypes.c_int(descriptor.fills_with_nan),
        )  # fmt: skip
        return found

    def _of(self, name: str, *kinds: Any) -> Any:
        function = getattr(self._library, name)
        function.argtypes, function.restype = kinds, ctypes.c_int
        return function

    def _call(self, name: str, *args: Any) -> None:
        self._check(name, getattr(self._library, name)(*args))

    def _check(self, name: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            getattr(self._library, self.names.error)(code, ctypes.byref(text))
            raise RuntimeError(f"{name} failed with {code}: {(text.value or b'?').decode()}")


@lru_cache(maxsize=len(DRIVERS))
def modules(backend: str) -> Modules:
    """Those of this process."""
    return Modules(backend)
