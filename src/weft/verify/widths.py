"""How wide stores are, and which addresses of peers keep them narrow.

Triton chooses a store's width by what divides its address. It does not know that the difference of
two 64-bit addresses loaded from one table is a distance between heaps, which begin on pages:
`wl.at` says so by a hint, and an address made without it falls to stores of one element.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from weft.ir.ttir import Op, Type, Value
from weft.verify import amdgcn, machine, ptx
from weft.verify.events import base_name, is_tile
from weft.verify.places import Loc, is_known, key_of
from weft.verify.ttgir import Function, Module

FULL = 16


def emitted(program: machine.Program) -> dict[Loc, int]:
    """The narrowest store instruction to global memory of each place."""
    found: dict[Loc, int] = {}
    for one in program.instructions:
        if isinstance(one, ptx.Instruction):
            is_store = one.base == "st" and one.is_global
        else:
            is_store = isinstance(one, amdgcn.Instruction) and one.is_store
        if is_store and is_known(one.loc) and one.bytes:
            found[one.loc] = min(found.get(one.loc, one.bytes), one.bytes)
    return found


def without_hint(function: Function, module: Module | None) -> Iterator[Op]:
    """Tile stores, of 16 bytes a thread or more, to addresses that a heap distance goes into.

    Stores in a layout that is not chosen for the sake of their addresses are left out.
    """
    if module is None:
        return
    layouts = {
        key_of(operation.chain): operation.text
        for operation in module.kernel.walk()
        if base_name(operation) in ("store", "buffer_store")
    }
    for operation in function.walk():
        if operation.name != "tt.store" or not is_tile(operation):
            continue
        names = re.findall(r"#\w+", layouts.get(key_of(operation.chain), "").split(" loc(")[0])
        is_blocked = bool(names) and f"{names[-1]} = #ttg.blocked" in module.text
        if is_blocked and _bytes_per_thread(operation.types[0], module.text) >= FULL:
            if _has_distance(function, operation.operands[0]):
                yield operation


def _bytes_per_thread(tensor: Type, module: str) -> int:
    warps = re.search(r'"ttg\.num-warps" = (\d+)', module)
    threads = re.search(r'"ttg\.threads-per-warp" = (\d+)', module)
    num_threads = (int(warps[1]) if warps else 4) * (int(threads[1]) if threads else 32)
    bits = re.search(r"\d+", tensor.pointee)
    return tensor.size * max(int(bits[0]) // 8 if bits else 0, 1) // num_threads


def _has_distance(function: Function, address: Value) -> bool:
    """Is `address` computed from a distance between heaps, with no hint on the way?"""
    seen: set[Value] = set()
    todo = [address]
    while todo:
        value = todo.pop()
        operation = function.definitions.get(value)
        if value in seen or (operation is not None and "tt.divisibility" in operation.attributes):
            continue
        seen.add(value)
        if operation is not None and _is_distance(function, operation):
            return True
        if operation is None or operation.name != "tt.load":
            todo += function.inputs_of(value)
    return False


def _is_distance(function: Function, operation: Op) -> bool:
    """The difference of two 64-bit words loaded through one pointer."""
    if operation.name != "arith.subi" or operation.result.type.element != "i64":
        return False
    made = [function.definitions.get(value) for value in operation.operands]
    loads = [one for one in made if one is not None and one.name == "tt.load"]
    if len(loads) < 2:
        return False
    tables = [function.bases(one.operands[0]) for one in loads]
    return bool(tables[0]) and tables[0] == tables[1]
