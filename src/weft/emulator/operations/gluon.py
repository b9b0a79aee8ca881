"""ttg.* and ttng.*: what Gluon adds to TTIR: shared memory, mbarriers, asynchronous operations and
partitions. Layouts are what Triton's front end has checked: no value depends on one.

Tensor cores' sums are in flight until they are waited for. `in_flight` finds the values that may
be; whoever else takes one asks the runtime first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from weft.base.errors import OutOfResourcesError, UnsupportedError
from weft.emulator.inline_ptx import THREADS_OF_A_WARP
from weft.emulator.operations.memory import call_runtime, where
from weft.emulator.operations.table import OPERATIONS, operation
from weft.emulator.operations.tiles import integers

# What hands on sums in flight, and looks at none.
_CARRIERS = (
    "ttng.warp_group_dot", "ttng.warp_group_dot_wait", "scf.for", "scf.if", "scf.while",
    "scf.yield", "scf.condition",
)  # fmt: skip


def in_flight(function: Any) -> set[Any]:
    """The values of a function that may be a tensor core's sums under way."""
    ops = list(function.body.walk())
    kinds = {op.result.type for op in ops if op.name == _CARRIERS[0] and op.flag("isAsync")}
    return {
        value
        for op in (ops if kinds else ())
        if op.name in _CARRIERS and op.integer("pendings", 1)
        for value in (*op.results, *(arg for region in op.regions for arg in region.args))
        if value.type in kinds
    }


def looks_at(op: Any, sums: set[Any]) -> Iterator[Any]:
    """The operands of which `op` needs the values themselves."""
    if sums and op.name not in _CARRIERS:
        yield from (value for value in op.operands if value in sums)


@operation("ttg.convert_layout")
def alias(code: Any, op: Any) -> None:
    """The same values: a layout says which thread holds which."""
    code.alias(op.result, op.operands[0])


@operation("ttg.fp4_to_fp")
def fp4_to_fp(code: Any, op: Any) -> None:
    """Bytes as two floats of four bits each."""
    dtype = code.constant_dtype(code.numpy_dtype(op.result.type.element))
    text = f"from_fp4({code.full(op.operands[0])}, {op.integer('axis')}).astype({dtype})"
    code.set(op.result, text)


# Arithmetic on two elements at a time, as the same on each.
PACKED = {
    "add": "arith.addf", "sub": "arith.subf", "mul": "arith.mulf", "fma": "math.fma",
    "max": "arith.maxnumf", "min": "arith.minnumf",
}  # fmt: skip


@operation("ttng.packed_arith")
def packed_arithmetic(code: Any, op: Any) -> None:
    """From Triton 3.9 on: element by element what `arith` and `math` do."""
    kinds = {value.type.element for value in (op.result, *op.operands)}
    if op.words[0] not in PACKED or len(kinds) > 1:
        raise UnsupportedError(
            f"the emulator does not know packed {op.words[0]} of {', '.join(sorted(kinds))}: its"
            " operands and its result are of one type here",
            place=code.place,
        )
    one_by_one = replace(op, name=PACKED[op.words[0]])
    OPERATIONS[one_by_one.name](code, one_by_one)


# ---------------------------------------------------------------------------------------------
# Shared memory: `View`s of emulator/shared_memory.py


def name_of(op: Any) -> str:
    """What a function allocates for its caller is known by the caller's name for it."""
    names = (re.match(r"(\w+) = ", frame.source()) for frame in op.place.frames)
    return next((match[1] for match in names if match), op.result.name)


@operation("ttg.local_alloc")
def allocate(code: Any, op: Any) -> None:
    """A part of the block's shared memory, with values where they are given."""
    kind = op.result.type
    dtype = code.constant_dtype(code.pointee(op.result))
    values = code.full(op.operands[0]) if op.operands else "None"
    call_runtime(code, op, "allocate_shared", repr(name_of(op)), kind.shape, dtype, values)


@operation("ttg.local_load")
def local_load(code: Any, op: Any) -> None:
    """The values there."""
    call_runtime(code, op, "local_load", op.operands[0])


@operation("ttg.local_store")
def local_store(code: Any, op: Any) -> None:
    """Put values there."""
    values, memory = op.operands
    call_runtime(code, op, "local_store", memory, code.full(values))


@operation("ttg.local_gather")
def local_gather(code: Any, op: Any) -> None:
    """Elements along an axis, by their indices."""
    memory, indices = op.operands[:2]
    call_runtime(code, op, "local_gather", memory, code.full(indices), op.integer("axis"))


@operation("ttg.local_scatter")
def local_scatter(code: Any, op: Any) -> None:
    """Put values along an axis, by their indices."""
    memory, indices, values = op.operands[:3]
    tiles = code.full(values), code.full(indices)
    call_runtime(code, op, "local_scatter", memory, *tiles, op.integer("axis"))


@operation("ttg.memdesc_index")
def index(code: Any, op: Any) -> None:
    """One of the slots along the first axis."""
    call_runtime(code, op, "shared_index", *op.operands)


@operation("ttg.memdesc_subslice")
def subslice(code: Any, op: Any) -> None:
    """A part of the extents given, from offsets that are known."""
    starts = [int(word) for word in op.words] or integers(op.attributes["offsets"])
    parts = zip(starts, op.result.type.shape, strict=True)
    slices = "".join(f"slice({start}, {start + extent}), " for start, extent in parts)
    call_runtime(code, op, "shared_part", op.operands[0], f"({slices})")


@operation("ttg.memdesc_trans")
def transposed(code: Any, op: Any) -> None:
    """The axes in another order."""
    order = tuple(integers(op.attributes.get("order", "")))
    call_runtime(code, op, "shared_transpose", op.operands[0], order)


@operation("ttg.memdesc_reshape")
def reshaped(code: Any, op: Any) -> None:
    """The same elements in another shape."""
    text = f"{code.expr(op.operands[0])}.reshaped({op.result.type.shape})"
    code.set(op.result, text, ())


# ---------------------------------------------------------------------------------------------
# mbarriers, asynchronous copies, tensor cores


def predicate(code: Any, op: Any, place: int) -> str:
    """The operand at `place`, where there is one: without it the operation is done."""
    rest = [value for value in op.operands[place:] if value.type.element == "i1"]
    return code.expr(rest[0]) if rest else "True"


@operation("ttng.init_barrier", "ttng.inval_barrier")
def init_barrier(code: Any, op: Any) -> None:
    """Begin with phase 0 of `count` arrivals; or end the barrier's life."""
    method = op.name.removeprefix("ttng.")
    call_runtime(code, op, method, op.operands[0], *(int(word) for word in op.words))


@operation("ttng.barrier_expect", "ttng.arrive_barrier")
def arrive(code: Any, op: Any) -> None:
    """Arrive: so many times, or once with so many bytes to come."""
    method = op.name.removeprefix("ttng.")
    call_runtime(code, op, method, op.operands[0], int(op.words[0]), predicate(code, op, 1))


@operation("ttng.wait_barrier")
def wait_barrier(code: Any, op: Any) -> None:
    """Wait until the phase of this parity has ended."""
    barrier, parity = op.operands[:2]
    call_runtime(code, op, "wait_barrier", barrier, parity, predicate(code, op, 2))


@operation("ttng.async_tma_copy_global_to_local", "ttng.async_tma_copy_local_to_global")
def tma_copy(code: Any, op: Any) -> None:
    """A block between a descriptor's tensor and shared memory; a barrier counts loaded bytes."""
    descriptor, *rest = op.operands
    rank = len(descriptor.type.shape)
    where_ = f"({''.join(f'{code.expr(value)}, ' for value in rest[:rank])})"
    memory, *barrier = (value for value in rest if value.type.element == "memdesc")
    if barrier:
        pred = predicate(code, op, rank + 1)
        call_runtime(code, op, "tma_load", descriptor, where_, memory, barrier[0], pred)
    else:
        call_runtime(code, op, "tma_store", descriptor, where_, memory)


@operation("ttng.async_tma_reduce")
def tma_reduce(code: Any, op: Any) -> None:
    """A block of shared memory added to a tensor's, or another reduction, atomically."""
    descriptor, *rest, memory = op.operands
    where_ = f"({''.join(f'{code.expr(value)}, ' for value in rest)})"
    call_runtime(code, op, "tma_reduce", repr(op.words[0]), descriptor, where_, memory)


@operation("ttng.async_tma_gather", "ttng.async_tma_scatter")
def tma_rows(code: Any, op: Any) -> None:
    """Rows of a tensor that are named each, to or from shared memory."""
    descriptor, rows, column, memory, *barrier = op.operands
    words: list[Any] = [descriptor, code.full(rows), column, memory]
    if barrier:
        words += [barrier[0], predicate(code, op, 5)]
    call_runtime(code, op, "tma_gather" if barrier else "tma_scatter", *words)


@operation("ttng.async_tma_store_wait")
def store_wait(code: Any, op: Any) -> None:
    """All but so many stores have read their shared memory."""
    call_runtime(code, op, "store_wait", op.integer("pendings"))


@operation("ttg.async_copy_global_to_local")
def copy_async(code: Any, op: Any) -> None:
    """A tile of memory copied by threads that do not wait for it; masked elements are 0."""
    pointer, memory, mask = (*op.operands, None)[:3]
    call_runtime(code, op, "copy_async", *where(code, pointer, mask), memory)


@operation("ttg.async_commit_group", "ttg.async_wait", "ttng.fence_async_shared")
def nullary(code: Any, op: Any) -> None:
    """Close a group of copies; wait for all but so many; let asynchronous operations see what
    threads have written."""
    method = op.name.partition(".")[2]
    call_runtime(code, op, method, *([op.integer("num")] if method == "async_wait" else []))


@operation("ttng.async_copy_mbarrier_arrive", "ttg.async_copy_mbarrier_arrive")
def copies_arrive(code: Any, op: Any) -> None:
    """Every thread arrives when its copies so far are done."""
    threads = code.num_warps * THREADS_OF_A_WARP
    call_runtime(code, op, "copies_arrive", op.operands[0], threads, op.flag("noIncrement"))


@operation("ttng.warp_group_dot")
def warp_group_dot(code: Any, op: Any) -> None:
    """A @ b + c by tensor cores, which are waited for; c is left out where the last says so."""
    a, b, c = op.operands[:3]
    left = code.expr(a) if a.type.element == "memdesc" else code.full(a)
    use = code.expr(op.operands[3]) if len(op.operands) > 3 else "True"
    call_runtime(code, op, "multiply_async", left, b, code.full(c), use, op.flag("isAsync"))


@operation("ttng.warp_group_dot_wait")
def warp_group_dot_wait(code: Any, op: Any) -> None:
    """All but so many products are done."""
    code.line(f"rt.products_wait({op.integer('pendings')}, {code.loc(op)})")
    for result, value in zip(op.results, op.operands, strict=True):
        code.alias(result, value)


# ---------------------------------------------------------------------------------------------
# Partitions


@operation("ttg.warp_specialize")
def warp_specialize(code: Any, op: Any) -> None:
    """Partitions beside this program's own: functions of what they capture."""
    default, *regions = op.regions
    warps = [count for count in op.attributes["num_warps"] if count]
    _check_registers(op, code.names.num_warps, warps)
    names = []
    own_warps = code.num_warps
    for region, code.num_warps in zip(regions, warps, strict=True):
        name = code.names.identifier(code.function.name, region, f"partition{len(names)}")
        names.append(name)
        code.nested(name, region, "rt")
    code.num_warps = own_warps
    captured = "".join(f"{code.full(value)}, " for value in op.operands)
    code.line(f"rt.specialize(({''.join(f'{name}, ' for name in names)}), ({captured}))")
    values = code.ops(default.ops)
    left = "".join(f"{code.full(value)}, " for value in _left_behind(code.function, op))
    code.line(f"rt.join_partitions({f'({left})' if left else ''})")
    for result, value in zip(op.results, values, strict=True):
        code.set(result, code.expr(value), code.phys(value))


def _left_behind(function: Any, op: Any) -> Iterator[Any]:
    """Shared memory that is there before `op`, and that nothing names behind it."""
    ops = function.body.ops
    if op not in ops:  # in a loop it may be named again
        return
    before, after = ops[: ops.index(op)], ops[ops.index(op) + 1 :]
    named = {value for one in after for each in (one, *one.inside()) for value in each.operands}
    for alloc in before:
        if alloc.name == "ttg.local_alloc":
            views = {alloc.result}
            for one in before:
                if views.intersection(one.operands):
                    views.update(each for each in one.results if each.type.element == "memdesc")
            if not views & named:
                yield alloc.result


# Of a block: threads, registers, and what a thread may ask for.
MOST_WARPS, REGISTERS = 32, 1 << 16
FEWEST_REGISTERS, MOST_REGISTERS = 24, 256


def _check_registers(op: Any, own_warps: int, warps: list[int]) -> None:
    """Registers are dealt to groups of four warps: what is left must do for the program's own."""
    groups: list[list[int]] = [[] for _ in range(-(-sum(warps) // 4))]
    all_warps = own_warps + 4 * len(groups)
    if all_warps > MOST_WARPS:
        raise OutOfResourcesError(
            f"a block of {own_warps} warps and partitions of {', '.join(map(str, warps))} has"
            f" {all_warps}, in groups of four; GPUs take {MOST_WARPS}",
            place=op.place,
        )
    asked = integers(op.attributes.get("requestedRegisters", ""))
    if not asked or min(asked) < 0:
        return
    start = 0
    for count, registers in sorted(zip(warps, asked, strict=True), key=lambda pair: -pair[0]):
        for warp in range(start, start + count):
            groups[warp // 4].append(-(-registers // 8) * 8)
        start += count
    each = REGISTERS // (all_warps * THREADS_OF_A_WARP) // 8 * 8
    spare = sum(each - max(group) for group in groups) * 4
    left = (each * own_warps + spare) // own_warps // 8 * 8
    if left < FEWEST_REGISTERS or max(asked) > MOST_REGISTERS:
        raise OutOfResourcesError(
            f"partitions of {', '.join(map(str, warps))} warps ask for"
            f" {', '.join(map(str, asked))} registers per thread. Of the block's {REGISTERS} that"
            f" leaves {max(left, 0)} for each thread of the program's own {own_warps} warps, which"
            f" need {FEWEST_REGISTERS}; a thread has {MOST_REGISTERS} at most",
            place=op.place,
        )


@operation("ttg.warp_return", "ttg.local_dealloc")
def nothing(code: Any, op: Any) -> None:
    """A partition's end; and that of memory, which others do not get before the program's."""
