"""Binaries that are here already, launched through CUDA's driver: no compiler, nothing to build."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

WARP = 32
# More shared memory than this a kernel must ask for (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE..).
USUAL_SHARED_BYTES, MOST_DYNAMIC_SHARED = 48 << 10, 8


class Binary(NamedTuple):
    """One function of a binary, and what each of its programs takes.

    Units   shared_bytes: of one program; num_warps: of threads
    """

    code: bytes
    function: str
    num_warps: int
    shared_bytes: int
    cooperative: bool


def launch(
    kernel: Binary, grid: tuple[int, int, int], packed: Sequence[Any], stream: int | None
) -> None:
    """One launch of a kernel whose arguments are packed.

    Raises  RuntimeError: what the driver says
    """
    torch.cuda.current_stream()  # makes the device's context this thread's, where none was
    function = _function(kernel.code, kernel.function, kernel.shared_bytes, _device())
    places = (ctypes.c_void_p * len(packed))(*(ctypes.addressof(one) for one in packed))
    handle = torch.cuda.current_stream().cuda_stream if stream is None else stream
    threads = (WARP * kernel.num_warps, 1, 1)
    shape = (*map(ctypes.c_uint, (*grid, *threads, kernel.shared_bytes)), ctypes.c_void_p(handle))
    if kernel.cooperative:
        _check("cuLaunchCooperativeKernel", function, *shape, places)
    else:
        _check("cuLaunchKernel", function, *shape, places, None)


def _device() -> int:
    return torch.cuda.current_device()


@lru_cache(maxsize=256)
def _function(code: bytes, name: str, shared_bytes: int, device: int) -> ctypes.c_void_p:
    """The function of a binary, loaded once for each device."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check("cuModuleLoadData", ctypes.byref(module), code)
    _check("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    if shared_bytes > USUAL_SHARED_BYTES:
        attribute = ctypes.c_int(MOST_DYNAMIC_SHARED)
        _check("cuFuncSetAttribute", function, attribute, ctypes.c_int(shared_bytes))
    return function


def _check(name: str, *args: Any) -> None:
    library = _library()
    if code := getattr(library, name)(*args):
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name} failed with {code}: {(text.value or b'?').decode()}")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
