"""arith.*: integers in two's complement, floats at their own precision, conversions."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np

from weft.emulator.numerics import DTYPES, LARGEST
from weft.emulator.operations import indexing
from weft.emulator.operations.table import operation

# Templates: {0} {1} {2} are the operands as signed values, {u0} {u1} as unsigned ones, {dtype}
# the result's dtype. `bool` templates serve i1, whose arithmetic is modulo 2.
ELEMENTWISE = {
    "arith.addi": ("{0} + {1}", "{0} ^ {1}"),
    "arith.subi": ("{0} - {1}", "{0} ^ {1}"),
    "arith.muli": ("{0} * {1}", "{0} & {1}"),
    "arith.divsi": ("divsi({0}, {1})", None),
    "arith.divui": ("({u0} // {u1}).view({dtype})", "{0} & {1}"),
    "arith.remsi": ("remsi({0}, {1})", None),
    "arith.remui": ("({u0} % {u1}).view({dtype})", None),
    "arith.floordivsi": ("{0} // {1}", None),
    "arith.ceildivsi": ("-((-{0}) // {1})", None),
    "arith.ceildivui": ("({u0} // {u1} + ({u0} % {u1} != 0)).astype({dtype})", None),
    "arith.andi": ("{0} & {1}", "{0} & {1}"),
    "arith.ori": ("{0} | {1}", "{0} | {1}"),
    "arith.xori": ("{0} ^ {1}", "{0} ^ {1}"),
    "arith.shli": ("{0} << {1}", None),
    "arith.shrsi": ("{0} >> {1}", None),
    "arith.shrui": ("({u0} >> {u1}).view({dtype})", None),
    "arith.maxsi": ("np.maximum({0}, {1})", "{0} & {1}"),
    "arith.minsi": ("np.minimum({0}, {1})", "{0} | {1}"),
    "arith.maxui": ("np.maximum({u0}, {u1}).view({dtype})", "{0} | {1}"),
    "arith.minui": ("np.minimum({u0}, {u1}).view({dtype})", "{0} & {1}"),
    "arith.addf": ("{0} + {1}", None),
    "arith.subf": ("{0} - {1}", None),
    "arith.mulf": ("{0} * {1}", None),
    "arith.divf": ("{0} / {1}", None),
    "arith.remf": ("np.fmod({0}, {1})", None),
    "arith.negf": ("-{0}", None),
    "arith.maximumf": ("np.maximum({0}, {1})", None),
    "arith.minimumf": ("np.minimum({0}, {1})", None),
    "arith.maxnumf": ("np.fmax({0}, {1})", None),
    "arith.minnumf": ("np.fmin({0}, {1})", None),
    "arith.index_cast": ("{0}.astype({dtype})", "{0}"),
    "arith.extsi": ("{0}.astype({dtype})", "-{0}.astype({dtype})"),
    "arith.extui": ("{u0}.astype({dtype})", "{0}.astype({dtype})"),
    "arith.sitofp": ("{0}.astype({dtype})", "-{0}.astype({dtype})"),
    "arith.uitofp": ("{u0}.astype({dtype})", "{0}.astype({dtype})"),
}  # fmt: skip

COMPARISONS = {
    "eq": ("==", ""), "ne": ("!=", ""),
    "slt": ("<", ""), "sle": ("<=", ""), "sgt": (">", ""), "sge": (">=", ""),
    "ult": ("<", "u"), "ule": ("<=", "u"), "ugt": (">", "u"), "uge": (">=", "u"),
}  # fmt: skip
# On i1 true is -1 when signed, so the order turns round.
TURNED = {"slt": "ugt", "sle": "uge", "sgt": "ult", "sge": "ule"}

FLOAT_COMPARISONS = {
    "oeq": "{0} == {1}", "ogt": "{0} > {1}", "oge": "{0} >= {1}", "olt": "{0} < {1}",
    "ole": "{0} <= {1}", "une": "{0} != {1}",
    "one": "({0} < {1}) | ({0} > {1})", "ueq": "np.logical_not(({0} < {1}) | ({0} > {1}))",
    "ugt": "np.logical_not({0} <= {1})", "uge": "np.logical_not({0} < {1})",
    "ult": "np.logical_not({0} >= {1})", "ule": "np.logical_not({0} > {1})",
    "ord": "({0} == {0}) & ({1} == {1})", "uno": "({0} != {0}) | ({1} != {1})",
}  # fmt: skip


# What index arithmetic is as integers.
AFFINE = {
    "arith.addi": partial(indexing.both, rule=indexing.plus),
    "arith.subi": partial(indexing.both, rule=indexing.minus),
    "arith.muli": indexing.multiplied,
    "arith.extsi": indexing.widened,
}


# numpy's functions take many times as long on scalars as a comparison does.
SCALAR = {
    "arith.maxsi": "{0} if {0} > {1} else {1}",
    "arith.minsi": "{0} if {0} < {1} else {1}",
}


@operation(*ELEMENTWISE)
def elementwise(code: Any, op: Any) -> None:
    template, boolean = ELEMENTWISE[op.name]
    if op.operands[0].type.element == "i1":
        box = indexing.both_masks(code, op) if op.name == "arith.andi" else None
        code.elementwise(op, boolean or template, box=box)
    elif op.name in SCALAR and not code.vector and all(code.phys(x) == () for x in op.operands):
        code.elementwise(op, SCALAR[op.name])
    else:
        affine = AFFINE.get(op.name)
        code.elementwise(op, template, affine(code, op) if affine else None)


@operation("arith.cmpi")
def compare_integers(code: Any, op: Any) -> None:
    """Comparison of integers, signed or unsigned."""
    word, prefix = op.words[0], ""
    if op.operands[0].type.element == "i1":
        sign, _ = COMPARISONS[TURNED.get(word, word)]
    else:
        sign, prefix = COMPARISONS[word]
    box = indexing.compared(code, op)
    code.elementwise(op, f"{{{prefix}0}} {sign} {{{prefix}1}}", box=box)


@operation("arith.cmpf")
def compare_floats(code: Any, op: Any) -> None:
    """Comparison of floats, ordered or unordered."""
    if op.words[0] in ("true", "false"):
        code.set(op.result, code.constant(np.bool_(op.words[0] == "true")), ())
        return
    code.elementwise(op, FLOAT_COMPARISONS[op.words[0]])


@operation("arith.select")
def select(code: Any, op: Any) -> None:
    """The second where the first holds, else the third."""
    condition, a, b = op.operands
    if code.phys(condition) == () and not code.vector:
        phys = code.join(code.phys(a), code.phys(b))
        chosen = f"{code.shaped(a, phys)} if {code.expr(condition)} else {code.shaped(b, phys)}"
        code.set(op.result, chosen, phys)
    else:
        code.elementwise(op, "np.where({0}, {1}, {2})")


# ---------------------------------------------------------------------------------------------
# Conversions

# As ELEMENTWISE, but the second template is for a result of i1.
NARROWING = {
    "arith.trunci": ("{0}.astype({dtype})", "({0} & 1).astype({dtype})"),
    "arith.fptosi": ("float_to_int({0}, {dtype})", "{0} != 0"),
    "arith.fptoui": ("float_to_int({0}, {dtype}, True)", "{0} != 0"),
}


@operation(*NARROWING)
def narrow(code: Any, op: Any) -> None:
    template, boolean = NARROWING[op.name]
    code.elementwise(op, boolean if op.result.type.element == "i1" else template)


@operation("arith.truncf", "arith.extf", "tt.fp_to_fp")
def convert_float(code: Any, op: Any) -> None:
    """To nearest even, or toward zero where it says so; to fp8 saturating."""
    source, target = (DTYPES[kind.element] for kind in (op.operands[0].type, op.result.type))
    rounding = op.attributes.get("rounding", "rtne")
    narrows = target.itemsize < source.itemsize
    if source == target:
        code.alias(op.result, op.operands[0])
    elif narrows and "rtz" in str(rounding):
        code.elementwise(op, "round_to_zero({0}, {dtype})")
    elif target in LARGEST:
        code.elementwise(op, "to_fp8({0}, {dtype})")
    else:
        code.elementwise(op, "{0}.astype({dtype})")


@operation("arith.bitcast", "tt.bitcast")
def bitcast(code: Any, op: Any) -> None:
    source, target = op.operands[0].type, op.result.type
    same = DTYPES[source.element] == DTYPES[target.element]
    if same and source.shape == target.shape:
        code.alias(op.result, op.operands[0])
    else:
        code.elementwise(op, "{0}.view({dtype})")


# ---------------------------------------------------------------------------------------------
# Constants


@operation("arith.constant")
def constant(code: Any, op: Any) -> None:
    """A number, or a tile of them."""
    code.set_constant(op.result, constant_value(op))


@operation("ub.poison")
def poison(code: Any, op: Any) -> None:
    """An undefined value: zero here."""
    if op.result.type.element in DTYPES:
        code.set_constant(op.result, DTYPES[op.result.type.element].type(0))
    else:
        code.set(op.result, "None", ())


def constant_value(op: Any) -> np.generic | np.ndarray:
    """The number that `arith.constant` holds: a scalar for a splat, else a tile."""
    kind = op.result.type
    dtype = DTYPES[kind.element]
    dense = op.attributes.get("dense")
    if dense is None:
        return _number(op.words[0], dtype)
    text = dense[len("dense<") : -1].strip()
    if text.startswith('"0x'):
        data = np.frombuffer(bytes.fromhex(text[3:-1]), dtype)
        return data.reshape(kind.shape) if data.size == kind.size else data[0]
    if not text.startswith("["):
        return _number(text, dtype)
    numbers = [_number(word, dtype) for word in re.findall(r"[^\[\],\s]+", text)]
    return np.array(numbers, dtype).reshape(kind.shape)


def _number(text: str, dtype: np.dtype) -> np.generic:
    if text in ("true", "false"):
        return dtype.type(text == "true")
    if dtype.kind in "ib":
        value = int(text, 0)
        if dtype.kind == "b":
            return np.bool_(value & 1)
        return np.array(value & ((1 << 64) - 1), np.uint64).astype(dtype)[()]
    if text.startswith(("0x", "-0x")):
        bits = int(text, 16)
        return np.array(bits, f"u{dtype.itemsize}").view(dtype)[()]
    return np.array(float(text), np.float64).astype(dtype)[()]
