"""The types of a kernel's arguments where there is no launch: from launches in the file, from use.

A parameter that is loaded from or stored to is a pointer: to what the host made, where it is seen,
to words where it is waited for or changed by atomics, to addresses where it is a table, else to
float32. A constexpr takes the constant that a launch passes, its default, or a guess by its name.
"""

from __future__ import annotations

import ast

from weft.base.records import KernelRecord
from weft.verify.lint.registry import Kernel, Program
from weft.verify.lint.source import Device

TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float64": "fp64",
    "int8": "i8",
    "uint8": "u8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "bool": "i1",
}
# Attributes that any argument has; others are fields of a record.
OF_TENSORS = {"dtype", "type", "shape", "to", "cast", "value", "load", "store", "T"}
WORLD = ("*i64", "constexpr", "constexpr")
SLOT = ("*i64", "*i32", "*i64")
RANKS = 4
TILE = 16
YES = ("is_", "has_", "use_", "do_", "with_")


def record_of(program: Program, kernel: Kernel) -> KernelRecord:
    """How to lower `kernel` without a launch.

    Raises  ValueError: a parameter whose type cannot be told
    """
    from weft.language import SlotArg, WorldArg, language_version

    signature: dict[str, object] = {}
    constants: dict[str, object] = {}
    for name in kernel.device.names:
        if kernel.device.is_constexpr(name):
            constants[name] = constant_of(program, kernel.device, name)
        elif _is(name, "world", kernel):
            signature[name] = WORLD
            constants[name] = WorldArg(None, RANKS, language_version())
        elif _is(name, "slot", kernel):
            signature[name] = SLOT
            constants[name] = SlotArg(None, None, None)
        elif _is_record(name, kernel):
            raise ValueError(f"{name} is a record, and nothing says of what types")
        else:
            signature[name] = type_of(program, kernel, name)
    return KernelRecord(kernel.name, signature, constants)


def _is(name: str, what: str, kernel: Kernel) -> bool:
    """By name, or because a primitive takes it in that place."""
    if name == what:
        return True
    for op in kernel.ops:
        call = op.node
        if not isinstance(call, ast.Call) or op.path or not call.args:
            continue
        place = {"world": 0, "slot": 1 if op.name.startswith("wl.slot_w") else 0}[what]
        takes = op.to is not None if what == "world" else op.name.startswith("wl.slot_")
        if takes and op.name.startswith("wl.") and place < len(call.args):
            first = call.args[place]
            if isinstance(first, ast.Name) and first.id == name:
                return True
    return False


def _is_record(name: str, kernel: Kernel) -> bool:
    """Is it a named tuple of the user's?"""
    for node in ast.walk(kernel.device.node):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == name and node.attr not in OF_TENSORS:
                return True
    return any(f"{name}." in root for op in kernel.ops for root in op.pointer.roots)


def type_of(program: Program, kernel: Kernel, name: str) -> str:
    """Triton's word for one parameter's type."""
    annotation = next(arg.annotation for arg in kernel.device.parameters if arg.arg == name)
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    used = [op for op in kernel.ops if name in op.pointer.roots and op.kind != "opaque"]
    used += [op for op in kernel.ops if name in op.value.roots and op.kind in ("put", "get")]
    if any(f"{name}[]" in op.pointer.roots for op in kernel.ops):
        return "*i64"
    if not used:
        return "i32"
    for launch in program.host.launches_of(kernel.name):
        value = launch.values.get(name)
        if value is not None and value.dtype in TYPES:
            return f"*{TYPES[value.dtype]}"
    if any("packets" in op.name for op in used):
        return "*i64"
    words = ("wait", "test", "notify", "atomic", "barrier")
    is_word = any(op.kind in words and not op.is_tile_access for op in used)
    # What is read one by one, and never as a tile, is a count or an index.
    is_word = is_word or not any(
        op.is_tile_access or op.kind not in ("load", "store") or op.value.is_tile for op in used
    )
    return "*i32" if is_word else "*fp32"


def constant_of(program: Program, device: Device, name: str) -> object:
    """A value for a constexpr: that of a launch, the default, or a guess."""
    for launch in program.host.launches_of(device.name):
        value = launch.values.get(name)
        if value is not None and value.number is not None:
            return value.number
    args = [*device.node.args.posonlyargs, *device.node.args.args]
    for arg, default in zip(reversed(args), reversed(device.node.args.defaults)):
        if arg.arg == name:
            known = program.source.constant(default, program.source.constants)
            if known is not None:
                return known
    lower = name.lower()
    if lower in ("rank", "my_rank", "cur_rank"):
        return 1
    if lower in ("num_ranks", "world_size", "ranks"):
        return RANKS
    return True if lower.startswith(YES) else TILE
