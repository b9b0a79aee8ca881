"""ttng.tmem_* and ttng.tc_gen5_*: tensor memory and the tensor cores of sm_100."""

from __future__ import annotations

import re
from typing import Any

from weft.base.errors import UnsupportedError
from weft.emulator.operations.gluon import name_of, predicate
from weft.emulator.operations.memory import call_runtime
from weft.emulator.operations.table import operation

_LAYOUT = re.compile(r", (#\w+), #ttng\.tensor_memory")
_FIELD = re.compile(r"(\w+) = (\w+)")


def is_tensor_memory(kind: Any) -> bool:
    return "#ttng.tensor_memory" in kind.text


def layout_of(code: Any, kind: Any) -> str:
    """A tensor memory's layout, as Python that makes it (emulator/tensor_memory.py)."""
    found = _LAYOUT.search(kind.text)
    text = code.names.layouts.get(found[1], "") if found else ""
    fields = dict(_FIELD.findall(text))
    if "scales" in text:
        return "ScalesLayout()"
    if "blockM" not in fields or fields.get("twoCTAs") == "true":
        raise UnsupportedError(
            f"the emulator does not know the layout of tensor memory {text or kind.text}: blocks of"
            " a cluster are not emulated",
            place=code.place,
        )
    return f"MatrixLayout({fields['blockM']}, {fields['blockN']}, {fields.get('colStride', 1)})"


@operation("ttng.tmem_alloc")
def allocate(code: Any, op: Any) -> None:
    """Columns of the block's tensor memory, with values where they are given."""
    kind = op.result.type
    dtype = code.constant_dtype(code.pointee(op.result))
    values = code.full(op.operands[0]) if op.operands else "None"
    name = repr(name_of(op))
    call_runtime(
        code, op, "allocate_tensor", name, kind.shape, dtype, layout_of(code, kind), values
    )


@operation("ttng.tmem_load")
def load(code: Any, op: Any) -> None:
    """The values there; and from Triton 3.7 on, of each row the smallest or the largest."""
    call_runtime(code, op, "tensor_load", op.operands[0])
    reductions = [one for one in op.results[1:] if one.type.is_tensor]
    if reductions:
        raise UnsupportedError(
            "the emulator does not reduce what it loads of tensor memory: load, then gl.max or"
            " gl.min",
            place=code.place,
        )


@operation("ttng.tmem_store")
def store(code: Any, op: Any) -> None:
    """Put values there."""
    values, memory = op.operands[:2]
    call_runtime(code, op, "tensor_store", memory, code.full(values), predicate(code, op, 2))


@operation("ttng.tmem_subslice")
def subslice(code: Any, op: Any) -> None:
    """Some of the columns, from one on that is known."""
    first = op.integer("offset", op.attributes.get("N"))  # so from Triton 3.9 on
    if op.result.type.shape[:-1] != op.operands[0].type.shape[:-1]:
        raise UnsupportedError(
            "the emulator takes parts of tensor memory by columns, not by rows", place=code.place
        )
    call_runtime(code, op, "tensor_slice", op.operands[0], first, op.result.type.shape[-1])


@operation("ttg.memdesc_reinterpret")
def reinterpret(code: Any, op: Any) -> None:
    """The same bytes as other elements."""
    kind, memory = op.result.type, op.operands[0]
    dtype = code.constant_dtype(code.pointee(op.result))
    if is_tensor_memory(kind):
        words = dtype, kind.shape, layout_of(code, kind)
        call_runtime(code, op, "tensor_reinterpret", memory, *words)
        return
    lies = [repr(_how_it_lies(code, value)) for value in (memory, op.result)]
    call_runtime(code, op, "shared_reinterpret", memory, dtype, kind.shape, *lies)


def _how_it_lies(code: Any, value: Any) -> str:
    """How elements of shared memory lie: one word for all that lie one behind the other."""
    name = value.type.text.split(", ")[1]
    layout = code.names.layouts.get(name, name)
    order = ", ".join(map(str, reversed(range(len(value.type.shape)))))
    if "swizzled_shared" in layout and "maxPhase = 1," in layout and f"[{order}]" in layout:
        return "in order"
    return f"{layout} {value.type.shape} {code.pointee(value).itemsize}"


@operation("ttng.tmem_copy")
def copy(code: Any, op: Any) -> None:
    """From shared memory by a tensor core, in order with its products."""
    call_runtime(code, op, "tensor_copy", *op.operands[:2], _barriers(code, op, 2))


@operation("ttng.tc_gen5_commit")
def commit(code: Any, op: Any) -> None:
    """Let the barrier be arrived at when all products and copies so far are done."""
    call_runtime(code, op, "tensor_commit", op.operands[0], predicate(code, op, 1))


def _barriers(code: Any, op: Any, place: int) -> str:
    """The barriers from the operand at `place` on, each with whether it is arrived at."""
    rest = op.operands[place:]
    barriers = [value for value in rest if value.type.element == "memdesc"]
    predicates = [code.expr(value) for value in rest if value.type.element == "i1"]
    predicates = predicates or ["True"] * len(barriers)
    pairs = zip(barriers, predicates, strict=True)
    return f"({''.join(f'({code.expr(one)}, {pred}), ' for one, pred in pairs)})"


@operation("ttng.tc_gen5_mma")
def multiply(code: Any, op: Any) -> None:
    """D = A @ B + D in tensor memory, by a tensor core, which is waited for at a barrier."""
    a, b, d, use, pred = op.operands[:5]
    barriers = _barriers(code, op, 5)
    call_runtime(code, op, "tensor_multiply", a, b, d, use, pred, barriers, "()")


@operation("ttng.tc_gen5_mma_scaled")
def multiply_scaled(code: Any, op: Any) -> None:
    """The same of blocks of narrow floats, each with its scale."""
    a, b, d, a_scale, b_scale, use, pred = op.operands[:7]
    scales = "".join(
        f"({code.expr(scale)}, {str(op.attributes[side])!r}), "
        for side, scale in (("lhs", a_scale), ("rhs", b_scale))
    )
    barriers = _barriers(code, op, 7)
    call_runtime(code, op, "tensor_multiply", a, b, d, use, pred, barriers, f"({scales})")
