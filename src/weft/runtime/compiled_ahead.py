"""A script's kernels that `weft compile FILE.py -o DIR` has compiled, launched without a compiler.

    kernels = load("DIR", "cuda:90")
    kernels["pull"].launch((4,), row=row, out=out, ..., world=world.arg)

What operators and programs queue is in artefacts: see artefact.py.

The plan says of each kernel what Triton decided: its function's name, threads, shared memory, and
which arguments it takes in which order. Arguments are given by name, those that were constants are
compared with what was compiled. How many programs a launch has is the caller's to say.

A launch has no compiler that would look at its arguments, so each is checked here: that numbers
have the size of their type, that tensors are contiguous, of the compiled dtype and on the device. A
binary is launched only if it is the one that the plan was written with.

Limits  CUDA; no descriptors among the arguments (a TMA descriptor is made by Triton's launcher), no
        clusters, no scratch memory of Triton's own. A kernel takes strides as numbers of its own,
        or none: for a tensor that is not contiguous pass its data_ptr()
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from weft.base import artefacts
from weft.base.errors import DtypeError, ShapeError, UnsupportedError, UsageError
from weft.base.records import PLAN_FORMAT, KernelRecord, plain, plan_digest
from weft.base.whole_numbers import whole_number
from weft.runtime.backends.modules import NUMBERS, SCRATCH, Binary, modules

# torch's names of the elements that a pointer's word names; addresses alone have no dtype.
ELEMENTS = {
    "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "i1": "bool",
    "i8": "int8", "u8": "uint8", "i16": "int16", "i32": "int32", "i64": "int64",
    "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2",
}  # fmt: skip
ADDRESS = "u64"
LARGEST_FP32 = (2 - 2**-23) * 2.0**127
# How many programs a launch may have along each axis.
MOST_PROGRAMS = (2**31 - 1, 2**16 - 1, 2**16 - 1)


@dataclass(frozen=True)
class Parameter:
    """One word that a kernel takes: `path` leads to it through named tuples, `kind` is Triton's."""

    path: tuple[str | int, ...]
    kind: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel of a plan.

    Units   shared_bytes: of one program; num_warps: of threads
    """

    name: str
    target: str
    function: str
    num_warps: int
    shared_bytes: int
    cooperative: bool
    record: KernelRecord
    code: bytes

    def parameters(self) -> list[Parameter]:
        """What it takes, in order.

        Raises  UnsupportedError: something that only Triton's launcher can make
        """
        found = []
        for name, kind in self.record.signature.items():
            found += _flat((name,), kind)
        for one in found:
            if not one.kind.startswith("*") and one.kind not in NUMBERS:
                raise UnsupportedError(
                    f"{self.name} takes {one.name} as {one.kind}, which is made by Triton's "
                    "launcher: launch the kernel through Triton, or compile it with tma=False"
                )
        return found

    def pack(self, arguments: Mapping[str, Any], device: Any = None) -> list[Any]:
        """Each argument as the ctypes number that the kernel takes, in order, scratch included.

        `device` is where it will be launched; None is not known yet.

        Raises  UsageError: one is missing or unknown, is another constant than was compiled, does
                not fit its type, is elsewhere, or not divisible by 16 where the code relies on it
                DtypeError: a tensor of other elements
                ShapeError: a tensor that is not contiguous
        """
        record = self.record
        if unknown := arguments.keys() - record.signature.keys():
            raise UsageError(
                f"{self.name} takes no {', '.join(sorted(unknown))}; it takes "
                f"{', '.join(record.signature)}"
            )
        for name, kind in record.signature.items():
            if name in arguments:
                self._compare(name, kind, record.constants.get(name), arguments[name])
        packed = []
        for one in self.parameters():
            value = self._value(one, arguments, device)
            if one.name in record.divisible_by_16 and value % 16:
                raise UsageError(
                    f"{self.name}: {one.name} is {value}, but was compiled as divisible by 16"
                )
            packed.append(NUMBERS.get(one.kind, ctypes.c_uint64)(value))
        return packed + [ctypes.c_uint64(0) for _ in range(SCRATCH)]

    def _value(self, parameter: Parameter, arguments: Mapping[str, Any], device: Any) -> Any:
        first, *rest = parameter.path
        if first not in arguments:
            raise UsageError(f"{self.name}: {first} is missing, {self.record.signature[first]}")
        value = arguments[first]
        for index in rest:
            value = value[index]
        what = f"{self.name}: {parameter.name}"
        if hasattr(value, "data_ptr"):
            _check_tensor(what, parameter.kind, value, device)
            return value.data_ptr()
        if parameter.kind.startswith("fp"):
            return _fraction(what, parameter.kind, value)
        return _integer(what, parameter.kind, value)

    def _compare(self, name: str, kind: Any, compiled: Any, given: Any) -> None:
        if isinstance(kind, (list, tuple)):
            if not isinstance(given, (list, tuple)) or len(given) != len(kind):
                raise UsageError(
                    f"{self.name}: {name} is {given!r}, but takes a tuple of {len(kind)}: {kind}"
                )
            constants = compiled or [None] * len(kind)
            for index, (inner, constant) in enumerate(zip(kind, constants, strict=True)):
                self._compare(f"{name}.{index}", inner, constant, given[index])
        elif kind == "constexpr" and plain(getattr(given, "value", given)) != plain(compiled):
            raise UsageError(
                f"{self.name}: {name} is {given}, but {compiled} was compiled into the kernel"
            )

    def launch(self, grid: Sequence[int], *, stream: int | None = None, **arguments: Any) -> None:
        """Launch it on a stream's handle, torch's current one if none is named.

        Shapes  grid: programs along one to three axes
        Raises  as `pack`; ShapeError: a grid of other axes; RuntimeError: what the driver says
        """
        import torch

        shape, driver = self.programs(grid), modules("cuda")
        handle = torch.cuda.current_stream().cuda_stream if stream is None else stream
        device = torch.device("cuda", torch.cuda.current_device())
        packed = self.pack(arguments, device)
        places = (ctypes.c_void_p * len(packed))(*(ctypes.addressof(one) for one in packed))
        threads = 32 * self.num_warps
        binary = Binary(self.code, self.function, threads, self.shared_bytes, self.cooperative)
        driver.launch(binary, driver.function(binary, device), shape, places, handle)

    def programs(self, grid: Sequence[int]) -> tuple[int, int, int]:
        """A grid along three axes.

        Raises  ShapeError: of no axis or more than three, of no program or too many along one
        """
        if not isinstance(grid, Sequence) or not 1 <= len(grid) <= 3:
            raise ShapeError(f"{self.name}: the grid {grid!r} has no one to three axes, as (132,)")
        what = f"{self.name}: the number of programs along axis"
        x, y, z = (
            whole_number(f"{what} {axis} of the grid {grid!r}", extent, 1)
            for axis, extent in enumerate((*grid, 1, 1)[:3])
        )
        if any(extent > most for extent, most in zip((x, y, z), MOST_PROGRAMS, strict=True)):
            raise ShapeError(f"{self.name}: the grid {grid!r} is more than {MOST_PROGRAMS}")
        return x, y, z


def _check_tensor(what: str, kind: str, tensor: Any, device: Any) -> None:
    if not kind.startswith("*") or str(tensor.dtype) != f"torch.{ELEMENTS.get(kind[1:])}":
        raise DtypeError(
            f"{what} is a tensor of {tensor.dtype}, but the kernel was compiled for {kind}"
        )
    if not tensor.is_contiguous():
        raise ShapeError(
            f"{what} of shape {tuple(tensor.shape)} has strides {tensor.stride()}, at which nobody "
            "looks; pass a contiguous tensor, or its data_ptr() where strides are arguments"
        )
    # What the host has pinned is read by the device, too.
    if device not in (None, tensor.device) and not (tensor.is_cpu and tensor.is_pinned()):
        raise UsageError(
            f"{what} is on {tensor.device}, but the kernel is launched on {device}; move it there, "
            f"or make {tensor.device} the current device"
        )


def _integer(what: str, kind: str, value: Any) -> int:
    """Of a type's range: what does not fit would be cut to its lowest bits."""
    word = ADDRESS if kind.startswith("*") else kind
    bits, is_signed = int(word[1:]), word[0] == "i" and word != "i1"
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
    try:
        number = operator.index(value)
    except TypeError:
        takes = "a tensor or an address" if kind.startswith("*") else "a whole number"
        raise UsageError(f"{what} is {value!r}; it takes {takes}, {kind}") from None
    if not least <= number <= most:
        raise UsageError(
            f"{what} is {number}, but {kind} holds {least} to {most}; compile the kernel for such "
            "sizes"
        )
    return number


def _fraction(what: str, kind: str, value: Any) -> float:
    if not isinstance(value, Real):
        raise UsageError(f"{what} is {value!r}; it takes a number, {kind}")
    number = float(value)
    if kind == "fp32" and math.isfinite(number) and abs(number) > LARGEST_FP32:
        raise UsageError(f"{what} is {number}, but fp32 holds up to {LARGEST_FP32:.4g}")
    return number


def _flat(path: tuple[str | int, ...], kind: Any) -> Iterator[Parameter]:
    if isinstance(kind, (list, tuple)):
        for index, inner in enumerate(kind):
            yield from _flat((*path, index), inner)
    elif kind != "constexpr":
        yield Parameter(path, kind)


def load(folder: str | Path, target: str) -> dict[str, CompiledKernel]:
    """The kernels of a folder that are for `target`, by name.

    Raises  UsageError: no plan there, one of another version, none for this target, or files that
            have changed since they were written
            UnsupportedError: kernels that only Triton's launcher can launch
    """
    path = Path(folder) / "plan.json"
    plan = artefacts.read_format(path, PLAN_FORMAT, "plan", f"weft compile OP -o {folder}")
    kernels = plan.get("kernels")
    if plan.get("sha256") != plan_digest(kernels):
        raise artefacts.damaged(path, "its kernels are not those that its sha256 is of")
    entries = [entry for entry in kernels if entry["target"] == target]
    if not entries:
        there = ", ".join(sorted({entry["target"] for entry in kernels})) or "none"
        raise UsageError(f"{path} has no kernel for {target}, only for {there}")
    if not target.startswith("cuda:"):
        raise UnsupportedError(f"{path}: kernels for {target} are launched by Triton alone")
    return {entry["name"]: _kernel(entry, path) for entry in entries}


def _kernel(entry: Mapping[str, Any], path: Path) -> CompiledKernel:
    name = entry["name"]
    for what, usual in (("num_ctas", 1), ("scratch_bytes", 0)):
        if entry[what] != usual:
            raise UnsupportedError(
                f"{name} has {what}={entry[what]}: Triton's launcher is needed for that"
            )
    record = KernelRecord(**entry["record"])
    return CompiledKernel(
        name, entry["target"], entry["function"], entry["num_warps"], entry["shared_bytes"],
        entry["cooperative"], record,
        artefacts.read_file(path.parent, {"file": entry["binary"], "sha256": entry["sha256"]}),
    )  # fmt: skip
