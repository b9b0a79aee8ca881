"""`cuda.bindings.driver` of an emulated rank: what hosts of the field ask of it, which is streams
that write words, and that wait for them."""

from __future__ import annotations

import enum
import operator
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from typing import Any

import numpy as np

from weft.base.errors import UsageError
from weft.base.user_place import user_place
from weft.emulator.context import RankContext, context_of_rank
from weft.emulator.device import Work
from weft.emulator.memory import behind
from weft.emulator.works import WordWait, WordWork

NAMES = ("cuda", "cuda.bindings", "cuda.bindings.driver")
WORDS = {32: np.dtype(np.int32), 64: np.dtype(np.int64)}


class CUstreamWaitValue_flags(enum.IntEnum):
    CU_STREAM_WAIT_VALUE_GEQ = 0
    CU_STREAM_WAIT_VALUE_EQ = 1
    CU_STREAM_WAIT_VALUE_AND = 2
    CU_STREAM_WAIT_VALUE_NOR = 3


class CUstreamWriteValue_flags(enum.IntEnum):
    CU_STREAM_WRITE_VALUE_DEFAULT = 0


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0


class CUstream(int):
    """A stream's handle: its number."""


class CUdeviceptr(int):
    """An address."""


def _passes(flags: int, dtype: np.dtype) -> tuple[str, Callable[[int, int], bool]]:
    """Of what is seen and the value: is the wait over? With its sign."""
    if int(flags) == CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ:
        return ">=", lambda seen, value: not behind(seen, value, dtype)
    if int(flags) == CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ:
        return "=", operator.eq
    if int(flags) == CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_AND:
        return "a bit of", lambda seen, value: bool(seen & value)
    raise UsageError(f"a stream's wait with flags {flags} is not emulated", place=user_place())


def _wait(bits: int, stream: Any, addr: Any, value: int, flags: int = 0) -> tuple[CUresult]:
    dtype, place = WORDS[bits], user_place()
    (sign, passes), value = _passes(flags, dtype), int(np.array(value).astype(dtype))
    wanted = f"{sign} {value}"
    return _queue(stream, lambda: WordWait(int(addr), dtype, value, passes, wanted, place=place))


def _write(bits: int, stream: Any, addr: Any, value: int, flags: int = 0) -> tuple[CUresult]:
    dtype, place = WORDS[bits], user_place()
    value = int(np.array(value).astype(dtype))
    return _queue(stream, lambda: WordWork(int(addr), value, dtype, place=place))


def _queue(number: Any, make: Callable[[], Work]) -> tuple[CUresult]:
    context: RankContext = context_of_rank("cuda.bindings.driver")
    streams = {stream.number: stream for stream in context.device.streams(context.rank)}
    if int(number) not in streams:
        raise UsageError(
            f"{number} is no stream of this rank: pass torch.cuda.current_stream().cuda_stream",
            place=user_place(),
        )
    before, context.stream = context.stream, streams[int(number)]
    try:
        context.enqueue(make)
    finally:
        context.stream = before
    return (CUresult.CUDA_SUCCESS,)


def intercept_driver() -> Callable[[], None]:
    """Answer `cuda.bindings.driver`, installed or not; returns the undo."""
    functions: dict[str, Any] = {
        f"cuStream{what}Value{bits}": partial(function, bits)
        for what, function in (("Wait", _wait), ("Write", _write))
        for bits in WORDS
    }
    if find_spec("cuda") is not None and find_spec("cuda.bindings") is not None:
        from cuda.bindings import driver  # type: ignore

        before = {name: getattr(driver, name) for name in functions}
        for name, function in functions.items():
            setattr(driver, name, function)
        return lambda: [setattr(driver, *item) for item in before.items()] and None
    modules = [module_from_spec(ModuleSpec(name, None, is_package=True)) for name in NAMES]
    modules[0].bindings, modules[1].driver = modules[1], modules[2]  # type: ignore
    for one in (
        CUstreamWaitValue_flags, CUstreamWriteValue_flags, CUresult, CUstream, CUdeviceptr
    ):  # fmt: skip
        functions[one.__name__] = one
    vars(modules[2]).update(functions)
    sys.modules.update(zip(NAMES, modules, strict=True))

    def restore() -> None:
        for name in NAMES:
            sys.modules.pop(name, None)

    return restore
