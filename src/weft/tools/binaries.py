"""A compiled kernel's binary, and what it uses: read from the binary, no device needed."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.base.records import KernelRecord
from weft.base.target import Target

# The binary of each backend, and the assembly that it was made from.
FORMATS = {"cuda": ("cubin", "ptx"), "hip": ("hsaco", "amdgcn"), "emu": ("emu", "ttir")}
# Memory of Triton's own that a launch has to bring along.
SCRATCH = ("global", "profile")
# What a kernel takes, by the names that each backend's tools give it.
REGISTERS = {"cuda": r"REG:(\d+)", "hip": r"\.vgpr_count:\s+(\d+)"}
STACK_BYTES = {"cuda": r"STACK:(\d+)", "hip": r"\.private_segment_fixed_size:\s+(\d+)"}


@dataclass(frozen=True)
class Binary:
    """One kernel compiled for one target.

    `registers` is per thread, and so is `stack_bytes`, memory for what they do not hold; None where
    the target has none (emu) or the tool that reads them is missing.
    Units   bytes, shared_bytes, stack_bytes: bytes
    """

    name: str
    target: str
    format: str
    bytes: int
    registers: int | None
    shared_bytes: int
    stack_bytes: int | None = field(repr=False, compare=False, default=None)
    code: bytes = field(repr=False, compare=False, default=b"")
    assembly: str = field(repr=False, compare=False, default="")
    record: KernelRecord | None = field(repr=False, compare=False, default=None)
    metadata: dict[str, Any] = field(repr=False, compare=False, default_factory=dict)

    def to_json(self) -> dict[str, object]:
        shown = ("name", "target", "format", "bytes", "registers", "shared_bytes")
        return {name: value for name, value in asdict(self).items() if name in shown}

    def write(self, folder: Path) -> dict[str, object]:
        """Write code and assembly; returns what a loader must know, file names included."""
        stem = f"{self.name}.{self.target.replace(':', '_')}"
        binary, assembly = FORMATS[self.target.split(":")[0]]
        (folder / f"{stem}.{binary}").write_bytes(self.code)
        (folder / f"{stem}.{assembly}").write_text(self.assembly)
        record = self.record.to_plan() if self.record else None
        return {
            **self.to_json(),
            "binary": f"{stem}.{binary}",
            "sha256": hashlib.sha256(self.code).hexdigest(),
            "assembly": f"{stem}.{assembly}",
            "function": self.metadata.get("name", self.name),
            "num_warps": self.metadata.get("num_warps"),
            "num_ctas": self.metadata.get("num_ctas"),
            "cooperative": self.metadata.get("launch_cooperative_grid", False),
            "scratch_bytes": sum(self.metadata.get(f"{one}_scratch_size") or 0 for one in SCRATCH),
            "record": record,
        }


def build(fn: Any, record: KernelRecord, target: Target) -> Binary:
    """Compile `fn` as `record` says, for `target`.

    Raises  CompileError: with the user's line and Triton's reason
    """
    from weft.language.triton_api import compile_kernel

    return binary_of(compile_kernel(fn, record, target), record.name, target, record)


def binary_of(
    compiled: Any, name: str, target: Target, record: KernelRecord | None = None
) -> Binary:
    """The binary of a kernel that Triton has compiled for `target`."""
    kind, assembly_kind = FORMATS[target.backend]
    code = compiled.asm[kind]
    code = code if isinstance(code, bytes) else str(code).encode()
    assembly = str(compiled.asm[assembly_kind])
    return Binary(
        name=name,
        target=target.name,
        format=kind,
        bytes=len(code),
        registers=registers(target, code, assembly),
        shared_bytes=int(compiled.metadata.shared),
        stack_bytes=stack_bytes(target, code, assembly),
        code=code,
        assembly=assembly,
        record=record,
        metadata=compiled.metadata._asdict(),
    )


def registers(target: Target, code: bytes, assembly: str) -> int | None:
    """Registers per thread: from the cubin by cuobjdump, from the AMDGCN's own notes."""
    return _most(REGISTERS, target, code, assembly)


def stack_bytes(target: Target, code: bytes, assembly: str) -> int | None:
    """Of a thread, what is spilled included; read as `registers` are."""
    return _most(STACK_BYTES, target, code, assembly)


def _most(named: Mapping[str, str], target: Target, code: bytes, assembly: str) -> int | None:
    """The largest of the numbers that are named so; None where there is none."""
    if target.backend not in named:
        return None
    text = _resources(code) if target.backend == "cuda" else assembly
    return max(map(int, re.findall(named[target.backend], text)), default=None)


def _resources(cubin: bytes) -> str:
    """What cuobjdump, which is in Triton's wheel, says that `cubin` takes; empty without it."""
    from triton import knobs

    tool = knobs.nvidia.cuobjdump
    if tool is None or not Path(tool.path).exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool.path, "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True).stdout
