"""What an operation of TTIR or TTGIR does that matters to other ranks: loads, stores, atomics.

Inline assembly is read for its instructions; what has an order and a scope is asked for both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.verify.ttgir import Operation

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

_ASM_TEXT = re.compile(r'elementwise_inline_asm "((?:[^"\\]|\\.)*)"')
_ASM_READS = re.compile(
    r"\b(?:ld|atom|multimem\.ld_reduce)\.|\b(?:global|flat|buffer|s)_(?:load|atomic)"
)
_ASM_WRITES = re.compile(
    r"\b(?:st|red|atom|multimem\.(?:st|red))\.|\b(?:global|flat|buffer)_(?:store|atomic)"
)
_ASM_LABEL = re.compile(r"(?<![:\w$.])([A-Za-z_$.][\w$.]*)\s*:(?!:)")
_ASM_BRANCH = re.compile(r"\b(?:bra(?:\.uni)?|s_branch|s_cbranch_\w+)\s+([\w$.]+)")
_ASM_ORDER = re.compile(r"\b(acquire|release|acq_rel|relaxed|volatile)\b")
_ASM_MEMORY = re.compile(
    r"\b((?:ld|st|atom|red|multimem|fence|membar)\.[\w.:]+|(?:global|flat|buffer)_[a-z]\w*)"
)
ATOMIC_RMW = re.compile(r"^tt\.atomic_rmw (\w+), (\w+), (\w+),")
_CAS = re.compile(r"^tt\.atomic_cas (\w+), (\w+),")
_ORDERED = re.compile(r"^tt\.atomic_(?:load|store|poll)\b.*?\b(\w+), (\w+),")


@dataclass(frozen=True)
class Ordered:
    """An access with an order and a scope, as the program states them."""

    order: str
    scope: str
    is_tile: bool


def base_name(operation: Operation) -> str:
    """The operation's name within Triton's dialects; empty for others."""
    dialect, _, name = operation.name.partition(".")
    return name if dialect in DIALECTS else ""


def is_load(operation: Operation) -> bool:
    return base_name(operation) in LOADS


def is_asm(operation: Operation) -> bool:
    return base_name(operation) == "elementwise_inline_asm"


def asm_text(operation: Operation) -> str:
    """The assembly of an inline asm operation, with its line ends."""
    match = _ASM_TEXT.search(operation.text)
    text = match[1] if match else ""
    text = text.replace("${:uid}", "_uid").replace("\\22", '"')
    return re.sub(r"\\0[Aa]|\\09|\\n|\\t", "\n", text)


def asm_is_pure(operation: Operation) -> bool:
    return "pure = true" in operation.text


def asm_reads(operation: Operation) -> bool:
    return bool(_ASM_READS.search(asm_text(operation)))


def asm_writes(operation: Operation) -> bool:
    return bool(_ASM_WRITES.search(asm_text(operation)))


def asm_memory(operation: Operation) -> list[str]:
    """The memory instructions of an inline asm operation."""
    return _ASM_MEMORY.findall(asm_text(operation))


def asm_loops(operation: Operation) -> bool:
    """Does the assembly branch back to one of its own labels, and read memory?"""
    text = asm_text(operation)
    labels = {match[1]: match.start() for match in _ASM_LABEL.finditer(text)}
    back = any(
        labels.get(match[1], len(text)) < match.start() for match in _ASM_BRANCH.finditer(text)
    )
    return back and bool(_ASM_READS.search(text))


def order_of(operation: Operation) -> Ordered | None:
    """Order and scope of an atomic operation; None where the operation states none."""
    is_tile = "tensor<" in operation.text
    if match := ATOMIC_RMW.match(operation.text):
        return Ordered(match[2], _scope(match[3]), is_tile)
    if match := _CAS.match(operation.text):
        return Ordered(match[1], _scope(match[2]), is_tile)
    if match := _ORDERED.match(operation.text):
        return Ordered(match[1], _scope(match[2]), is_tile)
    return None


def _scope(word: str) -> str:
    return {"cta": "cta", "gpu": "gpu", "sys": "sys", "system": "sys"}.get(word, word)
