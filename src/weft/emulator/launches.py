"""Ordinary Triton launches of an emulated rank, turned into work on its current stream."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

from weft.base.errors import UnsupportedError, UsageError
from weft.base.user_place import user_place
from weft.emulator.actors import address_of
from weft.emulator.codegen import EmulatedKernel
from weft.emulator.context import RankContext, current
from weft.emulator.memory import wrap_add
from weft.emulator.plain_access import Descriptor
from weft.emulator.removed_waits import report_removed_waits
from weft.emulator.works import KernelWork
from weft.language.triton_api import Launch

_INTEGERS = {
    "i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u1": np.bool_, "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
}  # fmt: skip
_FLOATS = {"fp64": np.float64, "f64": np.float64, "fp32": np.float32, "f32": np.float32}
_FLOATS.update({"fp16": np.float16, "f16": np.float16, "bf16": np.float32})


def take_launch(launch: Launch) -> None:
    """Queue `launch` on the current stream of the rank that made it."""
    context = current()
    place = user_place()
    if context is None:
        raise UsageError(
            f"{launch.name} was launched inside weft.emulated() but not by a rank; launch it from "
            "the function that is given to ranks.run(...)",
            place=place,
        )
    file = launch.jit_function.fn.__code__.co_filename
    kernel = context.machine.rewrite.kernel(_own_text(launch.text, file, launch.num_warps))
    if launch.written:
        report_removed_waits(context, launch)
    arguments = Arguments(context, launch)
    if len(arguments.values) != len(kernel.parameters):
        raise UnsupportedError(
            f"{launch.name} takes {len(kernel.parameters)} values in TTIR "
            f"({', '.join(p.name for p in kernel.parameters)}), but the launch gives "
            f"{len(arguments.values)}",
            place=place,
        )
    context.machine.report.launches += 1
    context.enqueue(_maker(kernel, launch, arguments, place))


_KERNEL_FILE = re.compile(r'^#loc = loc\("([^"]*)":', re.MULTILINE)


@lru_cache(maxsize=1024)
def _own_text(text: str, file: str, num_warps: int) -> str:
    """A launch's TTIR with the places of the file that it was launched from.

    Triton's cache knows a kernel by its text: of two files with the same kernel, at the same
    line, the second one gets the first one's TTIR, and with it the first one's places.
    """
    if "tt.elementwise_inline_asm" in text:  # which may ask for its threads
        attribute = f'"ttg.num-warps" = {num_warps} : i32'
        text = text.replace("module {", f"module attributes {{{attribute}}} {{", 1)
    found = _KERNEL_FILE.search(text)
    if found is not None and found[1] != file:
        text = text.replace(f'loc("{found[1]}":', f'loc("{file}":')
        if os.path.basename(found[1]) == os.path.basename(file):
            # A copied folder: what the kernel calls from beside it was copied as well.
            before, now = os.path.dirname(found[1]), os.path.dirname(file)
            text = re.sub(rf'loc\("{re.escape(before)}/([^"/]*)":', rf'loc("{now}/\1":', text)
    return text


def _maker(kernel: EmulatedKernel, launch: Launch, arguments: Arguments, place: Any) -> Callable:
    grid, values, cooperative = launch.grid, arguments.values, launch.cooperative
    kept = arguments.context.keeping(*arguments.keep)

    def make() -> KernelWork:
        return KernelWork(kernel, grid, values, cooperative=cooperative, place=place, keep=kept())

    return make


class Arguments:
    """A launch's arguments as the generated function takes them; `keep` holds their tensors."""

    def __init__(self, context: RankContext, launch: Launch) -> None:
        self.context = context
        self.launch = launch
        self.values: list[Any] = []
        self.keep: list[Any] = []
        args = launch.args
        # A kernel that is given its hooks has its arguments' names in them.
        self.called = next((one.called for one in args.values() if hasattr(one, "called")), {})
        for name, kind in launch.signature.items():
            self._add(self.called.get(name, name), kind, args[name])

    def _add(self, name: str, kind: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            fields = getattr(value, "_fields", None) or range(len(kind))
            for field, inner_kind, inner in zip(fields, kind, value, strict=True):
                path = f"{name}.{field}"
                self._add(self.called.get(path, path), inner_kind, inner)
        elif kind == "constexpr":
            return
        elif kind[0] == "*":
            self.values.append(np.int64(self._address(name, value)))
        elif kind.startswith("tensordesc_im2col"):
            raise UnsupportedError(
                f"{self.launch.name}: {name} describes a tensor for im2col, which the emulator does"
                " not do",
                place=user_place(),
            )
        elif kind.startswith("tensordesc"):
            self.values.extend(self._descriptor(name, kind, value))
        elif kind in _INTEGERS:
            self.values.append(_integer(int(value), _INTEGERS[kind]))
        elif kind in _FLOATS:
            self.values.append(_FLOATS[kind](value))
        else:
            raise UnsupportedError(
                f"{self.launch.name}: the emulator cannot pass {name} of Triton type {kind!r}",
                place=user_place(),
            )

    def _address(self, name: str, value: Any) -> int:
        """A tensor's address; the checker comes to know its memory as `name`."""
        if isinstance(value, torch.Tensor):
            return self._tensor(name, value)
        if value is None:
            return 0
        if isinstance(value, int):
            return value
        base = getattr(value, "base", None)  # triton.reinterpret's wrapper
        if isinstance(base, torch.Tensor):
            return self._tensor(name, base)
        return int(value.data_ptr())

    def _tensor(self, name: str, tensor: torch.Tensor) -> int:
        if tensor.device.type != "cpu":
            raise UsageError(
                f"{self.launch.name}: {name} is on {tensor.device}; emulated ranks compute on "
                "world.device, the CPU",
                place=user_place(),
            )
        address = address_of(tensor)
        self.keep.append(tensor)
        if address:
            self.context.reach(tensor, address, name)
        return address

    def _descriptor(self, name: str, kind: str, value: Any) -> Iterator[Any]:
        """A host-made descriptor: the object, then its extents and strides."""
        tensor = value.base
        address = self._tensor(name, tensor)
        sizes = tuple(int(n) for n in value.shape)
        strides = tuple(int(n) for n in value.strides)
        dtype = _dtype_of(tensor)
        padding = getattr(value, "padding", "zero")
        yield Descriptor(address, sizes, strides, tuple(value.block_shape), dtype, padding)
        yield from map(np.int32, sizes)
        yield from map(np.int64, strides)


def _integer(value: int, kind: type) -> Any:
    """TTIR's integers have no sign: numbers keep their bits and are read as signed."""
    if kind is np.bool_:
        return np.bool_(value)
    return wrap_add(value, 0, np.dtype(f"i{np.dtype(kind).itemsize}"))


def _dtype_of(tensor: torch.Tensor) -> np.dtype:
    """The numpy dtype of a tensor's elements; those that numpy lacks are ml_dtypes'."""
    if tensor.dtype is torch.bool:
        return np.dtype(np.bool_)
    return np.dtype(getattr(ml_dtypes, name := str(tensor.dtype).removeprefix("torch."), name))
