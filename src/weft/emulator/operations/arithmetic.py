"""arith.*: integers in two's complement, floats at their own precision, conversions."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np

from weft.emulator.numerics import DTYPES, LARGEST
from weft.emulator.operations import indexing
from weft.emulator.operations.table import add, operation

# Templates: {0} {1} {2} are the operands as signed values, {u0} {u1} as unsigned ones, {dtype}
# the result's dtype. `bool` templates serve i1, whose arithmetic is modulo 2.
ELEMENTWISE = {
    "arith.addi": ("sum, wrapping", "{0} + {1}", "{0} ^ {1}"),
    "arith.subi": ("difference, wrapping", "{0} - {1}", "{0} ^ {1}"),
    "arith.muli": ("product, wrapping", "{0} * {1}", "{0} & {1}"),
    "arith.divsi": ("signed quotient, truncated toward zero", "divsi({0}, {1})", None),
    "arith.divui": ("unsigned quotient", "({u0} // {u1}).view({dtype})", "{0} & {1}"),
    "arith.remsi": ("signed remainder, the dividend's sign", "remsi({0}, {1})", None),
    "arith.remui": ("unsigned remainder", "({u0} % {u1}).view({dtype})", None),
    "arith.floordivsi": ("signed quotient, rounded down", "{0} // {1}", None),
    "arith.ceildivsi": ("signed quotient, rounded up", "ceildivsi({0}, {1})", None),
    "arith.ceildivui": (
        "unsigned quotient, rounded up",
        "({u0} // {u1} + ({u0} % {u1} != 0)).astype({dtype})", None,
    ),
    "arith.andi": ("bitwise and", "{0} & {1}", "{0} & {1}"),
    "arith.ori": ("bitwise or", "{0} | {1}", "{0} | {1}"),
    "arith.xori": ("bitwise exclusive or", "{0} ^ {1}", "{0} ^ {1}"),
    "arith.shli": ("shift left; all bits or more give 0", "{0} << {1}", None),
    "arith.shrsi": ("shift right, filled with the sign", "{0} >> {1}", None),
    "arith.shrui": ("shift right, filled with zeros", "({u0} >> {u1}).view({dtype})", None),
    "arith.maxsi": ("larger, signed", "np.maximum({0}, {1})", "{0} & {1}"),
    "arith.minsi": ("smaller, signed", "np.minimum({0}, {1})", "{0} | {1}"),
    "arith.maxui": ("larger, unsigned", "np.maximum({u0}, {u1}).view({dtype})", "{0} | {1}"),
    "arith.minui": ("smaller, unsigned", "np.minimum({u0}, {u1}).view({dtype})", "{0} & {1}"),
    "arith.addf": ("sum", "{0} + {1}", None),
    "arith.subf": ("difference", "{0} - {1}", None),
    "arith.mulf": ("product", "{0} * {1}", None),
    "arith.divf": ("quotient", "{0} / {1}", None),
    "arith.remf": ("remainder, the dividend's sign", "np.fmod({0}, {1})", None),
    "arith.negf": ("negation", "-{0}", None),
    "arith.maximumf": ("larger; NaN if either is", "np.maximum({0}, {1})", None),
    "arith.minimumf": ("smaller; NaN if either is", "np.minimum({0}, {1})", None),
    "arith.maxnumf": ("larger; a NaN loses", "np.fmax({0}, {1})", None),
    "arith.minnumf": ("smaller; a NaN loses", "np.fmin({0}, {1})", None),
    "arith.index_cast": ("index from or to an integer", "{0}.astype({dtype})", "{0}"),
    "arith.extsi": ("wider integer, sign kept", "{0}.astype({dtype})", "-{0}.astype({dtype})"),
    "arith.extui": (
        "wider integer, zeros in front", "{u0}.astype({dtype})", "{0}.astype({dtype})",
    ),
    "arith.sitofp": (
        "float from a signed integer", "{0}.astype({dtype})", "-{0}.astype({dtype})",
    ),
    "arith.uitofp": (
        "float from an unsigned integer", "{u0}.astype({dtype})", "{0}.astype({dtype})",
    ),
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


def _elementwise(name: str, template: str, boolean: str | None):
    affine = AFFINE.get(name)
    scalar = SCALAR.get(name)

    def emit(code: Any, op: Any) -> None:
        if op.operands[0].type.element == "i1":
            box = indexing.both_masks(code, op) if name == "arith.andi" else None
            code.elementwise(op, boolean or template, box=box)
        elif scalar and not code.vector and all(code.phys(x) == () for x in op.operands):
            code.elementwise(op, scalar)
        else:
            code.elementwise(op, template, affine(code, op) if affine else None)

    return emit


for _name, (_summary, _template, _boolean) in ELEMENTWISE.items():
    add(_name, _summary, _elementwise(_name, _template, _boolean))


@operation("arith.cmpi", "comparison of integers, signed or unsigned")
def compare_integers(code: Any, op: Any) -> None:
    word = op.words[0]
    if op.operands[0].type.element == "i1":
        word = TURNED.get(word, word)
    sign, prefix = COMPARISONS[word]
    if op.operands[0].type.element == "i1":
        prefix = ""
    box = indexing.compared(code, op)
    code.elementwise(op, f"{{{prefix}0}} {sign} {{{prefix}1}}", box=box)


@operation("arith.cmpf", "comparison of floats, ordered or unordered")
def compare_floats(code: Any, op: Any) -> None:
    if op.words[0] in ("true", "false"):
        code.set(op.result, code.constant(np.bool_(op.words[0] == "true")), ())
        return
    code.elementwise(op, FLOAT_COMPARISONS[op.words[0]])


@operation("arith.select", "the second where the first holds, else the third")
def select(code: Any, op: Any) -> None:
    condition, a, b = op.operands
    if code.vector:
        code.elementwise(op, "np.where({0}, {1}, {2})")
    elif code.phys(condition) == ():
        phys = code.join(code.phys(a), code.phys(b))
        chosen = f"{code.shaped(a, phys)} if {code.expr(condition)} else {code.shaped(b, phys)}"
        code.set(op.result, chosen, phys)
    else:
        code.elementwise(op, "np.where({0}, {1}, {2})")


def _extended(high: str):
    """Both halves of a product, the upper one by this function."""

    def emit(code: Any, op: Any) -> None:
        a, b = (code.expr(operand) for operand in op.operands)
        phys = code.join(*(code.phys(operand) for operand in op.operands))
        code.set(op.results[0], f"{a} * {b}", phys)
        code.set(op.results[1], f"{high}({a}, {b})", phys)

    return emit


add("arith.mului_extended", "unsigned product, low and high half", _extended("mulhiui"))
add("arith.mulsi_extended", "signed product, low and high half", _extended("mulhisi"))


# ---------------------------------------------------------------------------------------------
# Conversions

# As ELEMENTWISE, but the second template is for a result of i1.
NARROWING = {
    "arith.trunci": (
        "narrower integer, the low bits", "{0}.astype({dtype})", "({0} & 1).astype({dtype})",
    ),
    "arith.fptosi": (
        "signed integer from a float, toward zero, saturating; NaN gives 0",
        "float_to_int({0}, {dtype})", "{0} != 0",
    ),
    "arith.fptoui": (
        "unsigned integer from a float, toward zero, saturating; NaN gives 0",
        "float_to_int({0}, {dtype}, True)", "{0} != 0",
    ),
}  # fmt: skip


def _narrowing(template: str, boolean: str):
    return lambda code, op: code.elementwise(
        op, boolean if op.result.type.element == "i1" else template
    )


for _name, (_summary, _template, _boolean) in NARROWING.items():
    add(_name, _summary, _narrowing(_template, _boolean))


def convert_float(code: Any, op: Any) -> None:
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


add("arith.truncf", "narrower float, to nearest even", convert_float)
add("arith.extf", "wider float, exact", convert_float)
add("tt.fp_to_fp", "float to float, also fp8: saturating, rounding rtne or rtz", convert_float)


def bitcast(code: Any, op: Any) -> None:
    source, target = op.operands[0].type, op.result.type
    same = DTYPES[source.element] == DTYPES[target.element]
    if same and source.shape == target.shape:
        code.alias(op.result, op.operands[0])
    else:
        code.elementwise(op, "{0}.view({dtype})")


add("arith.bitcast", "the same bits as another type", bitcast)
add("tt.bitcast", "the same bits as another type; pointers too", bitcast)


# ---------------------------------------------------------------------------------------------
# Constants


@operation("arith.constant", "a number, or a tile of them")
def constant(code: Any, op: Any) -> None:
    code.set_constant(op.result, constant_value(op))


@operation("ub.poison", "an undefined value: zero here")
def poison(code: Any, op: Any) -> None:
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
