"""Kernels that `weft compile OP -o DIR` has compiled, loaded and launched without a compiler.

    kernels = load("DIR", "cuda:90")
    kernels["all_gather.packets"].launch((4,), x=x, out=out, ..., world=world.arg)

The plan says of each kernel what Triton decided: its function's name, threads, shared memory, and
which arguments it takes in which order. Arguments are given by name, those that were constants are
compared with what was compiled. How many programs a launch has is the caller's to say.

Limits  CUDA; no descriptors among the arguments (a TMA descriptor is made by Triton's launcher), no
        clusters, no scratch memory of Triton's own
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.base.errors import DtypeError, UnsupportedError, UsageError
from weft.base.records import PLAN_FORMAT, KernelRecord

# Triton's words for what a kernel takes by value, and how wide they are.
NUMBERS = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32,
    "i64": ctypes.c_int64, "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
# torch's names of the elements that a pointer's word names; addresses alone have no dtype.
ELEMENTS = {
    "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "i1": "bool",
    "i8": "int8", "u8": "uint8", "i16": "int16", "i32": "int32", "i64": "int64",
    "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2",
}  # fmt: skip
# Behind all others a kernel takes two addresses of Triton's own scratch memory.
SCRATCH = (ctypes.c_uint64, ctypes.c_uint64)


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

    def pack(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Each argument as the ctypes number that the kernel takes, in order, scratch included.

        Raises  UsageError: one is missing or unknown, is another constant than was compiled, or is
                not divisible by 16 where the code relies on it
                DtypeError: a tensor of other elements
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
            value = self._value(one, arguments)
            if one.path[0] in record.divisible_by_16 or one.name in record.divisible_by_16:
                if value % 16:
                    raise UsageError(
                        f"{self.name}: {one.name} is {value}, but was compiled as divisible by 16"
                    )
            packed.append(NUMBERS.get(one.kind, ctypes.c_uint64)(value))
        return packed + [kind(0) for kind in SCRATCH]

    def _value(self, parameter: Parameter, arguments: Mapping[str, Any]) -> Any:
        first, *rest = parameter.path
        if first not in arguments:
            raise UsageError(f"{self.name}: {first} is missing, {self.record.signature[first]}")
        value = arguments[first]
        for index in rest:
            value = value[index]
        if not hasattr(value, "data_ptr"):
            return value
        element = ELEMENTS.get(parameter.kind[1:])
        if not parameter.kind.startswith("*") or str(value.dtype) != f"torch.{element}":
            raise DtypeError(
                f"{self.name}: {parameter.name} is a tensor of {value.dtype}, but the kernel was "
                f"compiled for {parameter.kind}"
            )
        return value.data_ptr()

    def _compare(self, name: str, kind: Any, compiled: Any, given: Any) -> None:
        if isinstance(kind, (list, tuple)):
            constants = compiled or [None] * len(kind)
            for index, (inner, constant) in enumerate(zip(kind, constants, strict=True)):
                self._compare(f"{name}.{index}", inner, constant, given[index])
        elif kind == "constexpr" and getattr(given, "value", given) != compiled:
            raise UsageError(
                f"{self.name}: {name} is {given}, but {compiled} was compiled into the kernel"
            )

    def launch(self, grid: Sequence[int], *, stream: int | None = None, **arguments: Any) -> None:
        """Launch it on a stream's handle, torch's current one if none is named.

        Shapes  grid: programs along one to three axes
        Raises  as `pack`; RuntimeError: what the driver says
        """
        from weft.runtime.backends.cuda_modules import launch

        launch(self, (*grid, 1, 1)[:3], self.pack(arguments), stream)


def _flat(path: tuple[str | int, ...], kind: Any) -> Iterator[Parameter]:
    if isinstance(kind, (list, tuple)):
        for index, inner in enumerate(kind):
            yield from _flat((*path, index), inner)
    elif kind != "constexpr":
        yield Parameter(path, kind)


def load(folder: str | Path, target: str) -> dict[str, CompiledKernel]:
    """The kernels of a folder that are for `target`, by name.

    Raises  UsageError: no plan there, one of another version, or none for this target
            UnsupportedError: kernels that only Triton's launcher can launch
    """
    path = Path(folder) / "plan.json"
    try:
        plan = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(
            f"{path} is no plan: {error}; `weft compile OP -o {folder}` writes one"
        ) from error
    if plan.get("format") != PLAN_FORMAT:
        raise UsageError(
            f"{path} has format {plan.get('format')}, this weft reads {PLAN_FORMAT}: compile it "
            "again"
        )
    entries = [entry for entry in plan["kernels"] if entry["target"] == target]
    if not entries:
        there = ", ".join(sorted({entry["target"] for entry in plan["kernels"]}))
        raise UsageError(f"{path} has no kernel for {target}, only for {there}")
    return {entry["name"]: _kernel(entry, path.parent) for entry in entries}


def _kernel(entry: Mapping[str, Any], folder: Path) -> CompiledKernel:
    name = entry["name"]
    for what, usual in (("num_ctas", 1), ("scratch_bytes", 0)):
        if entry[what] != usual:
            raise UnsupportedError(
                f"{name} has {what}={entry[what]}: Triton's launcher is needed for that"
            )
    record = dict(entry["record"])
    record["divisible_by_16"] = tuple(record["divisible_by_16"])
    return CompiledKernel(
        name, entry["target"], entry["function"], entry["num_warps"], entry["shared_bytes"],
        entry["cooperative"], KernelRecord(**record), (folder / entry["binary"]).read_bytes(),
    )  # fmt: skip
