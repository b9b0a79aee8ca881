"""What an operation of TTIR or TTGIR does that matters to other ranks: loads, stores, atomics.

Inline assembly is read for its instructions; what has an order and a scope is asked for both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.ir.ttir import Op

DIALECTS = ("tt", "ttg", "ttng", "amdg", "amdgpu", "nvws", "ttag")
LOADS = {
    "load",
    "descriptor_load",
    "experimental_descriptor_load",
    "descriptor_gather",
    "async_copy_global_to_local",
    "async_tma_copy_global_to_local",
    "async_tma_gather",
    "async_tdm_copy_global_to_local",
    "buffer_load",
    "buffer_load_to_local",
}
STORES = {
    "store",
    "descriptor_store",
    "experimental_descriptor_store",
    "descriptor_reduce",
    "descriptor_scatter",
    "async_tma_copy_local_to_global",
    "async_tma_reduce",
    "async_tma_scatter",
    "async_tdm_copy_local_to_global",
    "buffer_store",
}
ATOMICS = {"atomic_rmw", "atomic_cas", "atomic_load", "atomic_store", "atomic_poll"}

_ASM_READS = re.compile(
    r"\b(?:ld|atom|multimem\.ld_reduce)\.|\b(?:global|flat|buffer|s)_(?:load|atomic)"
)
_ASM_WRITES = re.compile(
    r"\b(?:st|red|atom|multimem\.(?:st|red))\.|\b(?:global|flat|buffer)_(?:store|atomic)"
)
_ASM_LABEL = re.compile(r"(?<![:\w$.])([A-Za-z_$.][\w$.]*)\s*:(?!:)")
_ASM_BRANCH = re.compile(r"\b(?:bra(?:\.uni)?|s_branch|s_cbranch_\w+)\s+([\w$.]+)")
_ASM_MEMORY = re.compile(
    r"\b((?:ld|st|atom|red|multimem|fence|membar)\.[\w.:]+|(?:global|flat|buffer)_[a-z]\w*)"
)


@dataclass(frozen=True)
class Ordered:
    """An access with an order and a scope, as the program states them."""

    order: str
    scope: str
    is_tile: bool


def base_name(operation: Op) -> str:
    """The operation's name within Triton's dialects; empty for others."""
    dialect, _, name = operation.name.partition(".")
    return name if dialect in DIALECTS else ""


def is_load(operation: Op) -> bool:
    return base_name(operation) in LOADS


def is_asm(operation: Op) -> bool:
    return base_name(operation) == "elementwise_inline_asm"


def asm_text(operation: Op) -> str:
    """The assembly of an inline asm operation, with its line ends."""
    return operation.strings[0].replace("${:uid}", "_uid") if is_asm(operation) else ""


def asm_is_pure(operation: Op) -> bool:
    return operation.flag("pure")


def asm_reads(operation: Op) -> bool:
    return bool(_ASM_READS.search(asm_text(operation)))


def asm_writes(operation: Op) -> bool:
    return bool(_ASM_WRITES.search(asm_text(operation)))


def asm_memory(operation: Op) -> list[str]:
    """The memory instructions of an inline asm operation."""
    return _ASM_MEMORY.findall(asm_text(operation))


def asm_loops(operation: Op) -> bool:
    """Does the assembly branch back to one of its own labels, and read memory?"""
    text = asm_text(operation)
    labels = {match[1]: match.start() for match in _ASM_LABEL.finditer(text)}
    back = any(
        labels.get(match[1], len(text)) < match.start() for match in _ASM_BRANCH.finditer(text)
    )
    return back and bool(_ASM_READS.search(text))


def is_tile(operation: Op) -> bool:
    return any(one.is_tensor for one in operation.types)


def order_of(operation: Op) -> Ordered | None:
    """Order and scope of an atomic operation; None where the operation states none."""
    name = base_name(operation)
    if name not in ATOMICS:
        return None
    order, scope = operation.words[1:3] if name == "atomic_rmw" else operation.words[:2]
    return Ordered(order, {"system": "sys"}.get(scope, scope), is_tile(operation))


def constant_of(operation: Op | None) -> int | bool | None:
    """The integer that an operation gives to every element, if it is a constant."""
    if operation is None or operation.name != "arith.constant":
        return None
    dense = str(operation.attributes.get("dense", "")).removeprefix("dense<").rstrip(">")
    word = dense or next(iter(operation.words), "")
    if word in ("true", "false"):
        return word == "true"
    return int(word) if re.fullmatch(r"-?\d+", word) else None
