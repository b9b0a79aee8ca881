"""The HIP runtime of an emulated rank, as Python calls it through ctypes: for hosts such as Iris's,
which share a heap with their peers by handles of its memory.

Ranks are of one process here, so a handle holds an address, and to open it is to read that. Memory
that is shared is symmetric from then on: the n-th of each rank belongs together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from weft.base.errors import UnsupportedError
from weft.base.user_place import user_place
from weft.emulator.context import RankContext, context_of_rank
from weft.language import triton_api

HEAP = "a heap that ranks share by handles"
WORD_BYTES = 4  # of a heap of bytes, what signals are made of
SUCCESS, INVALID_VALUE = 0, 1
# hipDeviceAttribute_t, with what this machine says; a clock's rate is in kHz.
NUM_CUS, WALL_CLOCK_RATE = 63, 10017


class HipRuntime(SimpleNamespace):
    """`libamdhip64.so`: functions that give an error's number."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(f"{name} of the HIP runtime is not emulated", place=user_place())


def _pointee(reference: Any) -> Any:
    """What `ctypes.byref`, or a pointer, refers to."""
    return reference._obj if hasattr(reference, "_obj") else reference.contents


def _address(pointer: Any) -> int:
    return int(getattr(pointer, "value", pointer) or 0)


def _share(handle: Any, pointer: Any) -> int:
    """Write into a handle what its memory's address is."""
    context, address = context_of_rank("hipIpcGetMemHandle"), _address(pointer)
    known = context.memory.find(address)
    if known is None or known.address != address:
        return INVALID_VALUE
    _make_symmetric(context, known)
    word = ctypes.c_uint64(address)
    ctypes.memmove(ctypes.addressof(_pointee(handle)), ctypes.byref(word), ctypes.sizeof(word))
    return SUCCESS


def _make_symmetric(context: RankContext, known: Any) -> None:
    """Know fresh memory anew, as the next of the rank's heaps, whose parts have no names."""
    if known.heap_offset is not None:
        return
    number = context.belongings[HipRuntime] = context.belongings.get(HipRuntime, -1) + 1
    owner = known.owner and known.owner()
    context.memory.forget(known)
    context.memory.register(
        known.address, known.nbytes, WORD_BYTES, context.rank, "heap", heap=(HEAP, number),
        heap_offset=0, initialised=False, owner=owner,
    )  # fmt: skip


def _open(result: Any, handle: Any, flags: int = 0) -> int:
    word = ctypes.c_uint64()
    ctypes.memmove(ctypes.byref(word), ctypes.addressof(handle), ctypes.sizeof(word))
    _pointee(result).value = word.value
    return SUCCESS


def _set(result: Any, value: int) -> int:
    _pointee(result).value = value
    return SUCCESS


def _attribute(result: Any, attribute: Any, device: int = 0) -> int:
    known = triton_api.EmulatorDriver.device_properties
    values = {NUM_CUS: known["multiprocessor_count"], WALL_CLOCK_RATE: 100_000}
    if _address(attribute) not in values:
        return INVALID_VALUE
    return _set(result, values[_address(attribute)])


def _functions() -> HipRuntime:
    """Each a function of its own: scripts say what arguments it takes, `f.argtypes = ...`."""

    def local_rank() -> int:
        context = context_of_rank("hipGetDevice")
        return context.machine.topology.seat(context.rank).local_rank

    def local_size() -> int:
        context = context_of_rank("hipGetDeviceCount")
        return context.machine.topology.seat(context.rank).local_size

    return HipRuntime(
        hipGetErrorString=lambda error: b"hipErrorInvalidValue",
        hipGetDeviceCount=lambda result: _set(result, local_size()),
        hipGetDevice=lambda result: _set(result, local_rank()),
        hipSetDevice=lambda device: SUCCESS,
        hipDeviceGetAttribute=lambda *arguments: _attribute(*arguments),
        hipIpcGetMemHandle=lambda *arguments: _share(*arguments),
        hipIpcOpenMemHandle=lambda *arguments: _open(*arguments),
        hipIpcCloseMemHandle=lambda pointer: SUCCESS,
        hipDeviceSynchronize=lambda: SUCCESS,
    )


def intercept_hip() -> Callable[[], None]:
    """Answer a script that loads the HIP runtime; returns the undo."""
    loader: Any = ctypes.cdll
    load, before = loader.LoadLibrary, vars(loader).get("LoadLibrary")

    def load_library(name: str) -> Any:
        return _functions() if "libamdhip64" in str(name) else load(name)

    loader.LoadLibrary = load_library

    def restore() -> None:
        del loader.LoadLibrary
        if before is not None:
            loader.LoadLibrary = before

    return restore
