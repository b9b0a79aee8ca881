"""tt.*: what makes, reshapes, reduces and multiplies tiles."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from weft.base.errors import UnsupportedError
from weft.emulator.operations import indexing
from weft.emulator.operations.table import operation

AXES = {"x": 0, "y": 1, "z": 2}


@operation("tt.get_program_id", "tt.get_num_programs")
def program_id(code: Any, op: Any) -> None:
    """This program's index along an axis of the grid, or the grid's extent."""
    axis = AXES[op.words[0]] if op.words else op.integer("axis")
    what = "pid" if op.name == "tt.get_program_id" else "grid"
    code.set(op.result, f"rt.{what}[{axis}]", ())


# ---------------------------------------------------------------------------------------------
# Shapes. A tile may be held smaller than its type says, where numpy's broadcasting fills it up.


@operation("tt.make_range")
def make_range(code: Any, op: Any) -> None:
    """The integers from start to end."""
    start, end = op.integer("start"), op.integer("end")
    # A range of one does not move: its axis may be stretched by a broadcast.
    steps = (1,) if end - start > 1 else (0,)
    affine = indexing.Affine(steps, lambda: (start, steps))
    code.set_constant(op.result, np.arange(start, end, dtype=np.int32), affine)


@operation("tt.splat", "tt.broadcast", "tt.ptr_to_int", "tt.int_to_ptr")
def alias(code: Any, op: Any) -> None:
    """The same under another type: numpy stretches scalars and extents of 1."""
    code.alias(op.result, op.operands[0])


@operation("tt.unsplat")
def unsplat(code: Any, op: Any) -> None:
    """The only element of a tile."""
    tile = op.operands[0]
    if code.phys(tile) == ():
        code.alias(op.result, tile)
    else:
        code.set(op.result, f"{code.expr(tile)}.reshape(-1)[0]", ())


@operation("tt.expand_dims")
def expand_dims(code: Any, op: Any) -> None:
    """A tile with another extent of 1."""
    tile, axis = op.operands[0], op.integer("axis")
    phys = code.phys(tile)
    if phys == ():
        code.alias(op.result, tile)
        return
    index = [":"] * len(phys)
    index.insert(axis, "None")
    axes: list[int | None] = list(range(len(phys)))
    axes.insert(axis, None)
    wider = (*phys[:axis], 1, *phys[axis:])
    _moved(code, op, axes, lambda: f"{code.expr(tile)}[{', '.join(index)}]", wider)


def _moved(code: Any, op: Any, axes: list, text: Any, phys: tuple[int, ...]) -> None:
    """The operand with its axes rearranged, also as integers where it has that form."""
    affine = indexing.moved(code, op, axes)
    box = indexing.moved_mask(code, op, axes)
    if affine is not None or box is not None:
        code.set_lazy(op.result, text, phys, affine, box)
    else:
        code.set(op.result, text(), phys)


@operation("tt.reshape")
def reshape(code: Any, op: Any) -> None:
    """The same elements in another shape."""
    tile = op.operands[0]
    if code.phys(tile) == () or tile.type.shape == op.result.type.shape:
        code.alias(op.result, tile)
    else:
        code.set(op.result, f"{code.full(tile)}.reshape({op.result.type.shape})")


@operation("tt.trans")
def transpose(code: Any, op: Any) -> None:
    """A tile with its axes in another order."""
    tile = op.operands[0]
    phys = code.phys(tile)
    order = integers(op.attributes.get("order", ""))
    if phys == ():
        code.alias(op.result, tile)
        return
    call = ".T" if order == [1, 0] else f".transpose({tuple(order)})"
    turned = tuple(phys[axis] for axis in order)
    _moved(code, op, order, lambda: f"{code.expr(tile)}{call}", turned)


def integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\b\d+\b", str(text).split(":", 1)[-1])]


@operation("tt.split")
def split(code: Any, op: Any) -> None:
    """A tile whose last extent is 2, as two."""
    tile = op.operands[0]
    phys = code.phys(tile)
    for index, result in enumerate(op.results):
        if phys == ():
            code.alias(result, tile)
            continue
        which = index if phys[-1] == 2 else 0
        leading = "..., " if len(phys) > 1 else ""
        code.set(result, f"{code.expr(tile)}[{leading}{which}]", phys[:-1])


# Templates of whole tiles.
WHOLE = {
    "tt.join": "np.stack(({0}, {1}), -1)",
    "tt.cat": "np.concatenate(({0}, {1}))",
    "tt.gather": "gather({0}, {1}, {axis}, LOCATIONS[{loc}])",
    "tt.histogram": "histogram({0}, {1}, {extent})",
}


@operation(*WHOLE)
def whole(code: Any, op: Any) -> None:
    tiles = [*(code.full(operand) for operand in op.operands), "None"]
    shape = op.result.type.shape
    fields = {"axis": op.integer("axis", 0), "loc": code.loc(op), "extent": shape[0]}
    code.set(op.result, WHOLE[op.name].format(*tiles, **fields))


# ---------------------------------------------------------------------------------------------
# Pointers


@operation("tt.addptr")
def add_pointer(code: Any, op: Any) -> None:
    """A pointer moved by elements."""
    pointer, offset = op.operands
    itemsize = code.pointee(pointer).itemsize
    phys = code.join(code.phys(pointer), code.phys(offset))
    affine = indexing.both(code, op, indexing.plus, itemsize) if phys else None

    def text() -> str:
        known = code.known(offset)
        if known is not None:
            return code.constant(np.asarray(known, np.int64)[()] * np.int64(itemsize))
        # A 32-bit index times a 64-bit size is 64 bits wide.
        narrow = itemsize == 1 and code.dtype(offset) != "i64"
        if narrow:
            return f"{code.expr(offset)}.astype(i64)"
        size = "" if itemsize == 1 else f" * {code.constant(np.int64(itemsize))}"
        return f"{code.expr(offset)}{size}"

    if affine is not None:
        code.set_lazy(op.result, lambda: f"{code.expr(pointer)} + {text()}", phys, affine)
    else:
        code.set(op.result, f"{code.expr(pointer)} + {text()}", phys)


# ---------------------------------------------------------------------------------------------
# Reductions

# What a region of one operation on its two arguments is in numpy.
UFUNCS = {
    "arith.addf": "np.add", "arith.addi": "np.add",
    "arith.mulf": "np.multiply", "arith.muli": "np.multiply",
    "arith.maxnumf": "np.fmax", "arith.maximumf": "np.maximum", "arith.maxsi": "np.maximum",
    "arith.minnumf": "np.fmin", "arith.minimumf": "np.minimum", "arith.minsi": "np.minimum",
    "arith.maxui": "np.maximum", "arith.minui": "np.minimum",
    "arith.andi": "np.bitwise_and", "arith.ori": "np.bitwise_or",
    "arith.xori": "np.bitwise_xor",
}  # fmt: skip
UNSIGNED_ONES = ("arith.maxui", "arith.minui")
# Arithmetic on i1 is modulo 2.
BOOLEAN = {"np.add": "np.bitwise_xor", "np.multiply": "np.bitwise_and"}


def _ufunc(op: Any) -> tuple[str, bool] | None:
    """numpy's name for a region that is one known operation, and whether it is unsigned."""
    region = op.regions[0]
    if len(op.operands) != 1 or len(region.ops) != 2:
        return None
    body, end = region.ops
    simple = body.name in UFUNCS and end.operands == [body.result]
    if not simple or set(body.operands) != set(region.args):
        return None
    name = UFUNCS[body.name]
    if op.operands[0].type.element == "i1":
        name = BOOLEAN.get(name, name)
        if name in ("np.maximum", "np.minimum"):
            return None
    return name, body.name in UNSIGNED_ONES


@operation("tt.reduce")
def reduce(code: Any, op: Any) -> None:
    """A tile reduced along an axis by any associative function."""
    axis = op.integer("axis")
    if known := _ufunc(op):
        name, unsigned = known
        tile, dtype = op.operands[0], code.dtype(op.operands[0])
        source = code.full(tile)
        if unsigned:
            source, view = f"{code.unsigned(source, tile)}", f".view({dtype})"
            dtype = f"u{dtype[1:]}"
        else:
            view = ""
        kind = f", dtype={dtype}" if name in ("np.add", "np.multiply") else ""
        code.set(op.result, f"{name}.reduce({source}, axis={axis}{kind}){view}")
        return
    _combined(code, op, "reduce_with", axis)


@operation("tt.scan")
def scan(code: Any, op: Any) -> None:
    """The running reduction of a tile along an axis."""
    axis, reverse = op.integer("axis"), op.flag("reverse")
    known = _ufunc(op)
    if known and not known[1]:
        dtype = code.dtype(op.operands[0])
        source = code.full(op.operands[0])
        code.set(op.result, f"accumulate({known[0]}, {source}, {axis}, {reverse}, {dtype})")
        return
    _combined(code, op, "scan_with", axis, reverse)


@operation("tt.map_elementwise")
def map_elementwise(code: Any, op: Any) -> None:
    """A function of scalars, of each element of the tiles."""
    if op.integer("pack", 1) != 1:
        raise UnsupportedError(
            "the emulator maps functions of one element: leave out pack=", place=op.place
        )
    tiles = ", ".join(code.full(tile) for tile in op.operands)
    code.set_many(op.results, f"{code.combine(op)}({tiles})")


def _combined(code: Any, op: Any, function: str, *how: Any) -> None:
    """`function` of the operation's own combining function, how it goes, and its tiles."""
    words = [code.combine(op), *map(str, how), *(code.full(tile) for tile in op.operands)]
    code.set_many(op.results, f"{function}({', '.join(words)})")


# ---------------------------------------------------------------------------------------------
# Products


@operation("tt.dot")
def dot(code: Any, op: Any) -> None:
    """A @ b, summed in fp64, rounded to fp32, plus c; int32 sums of int8."""
    a, b, c = op.operands
    if code.dtype(c) != "f32":
        code.set(op.result, f"dot({code.full(a)}, {code.full(b)}, {code.expr(c)})")
        return
    # In f64, and rounded once: what a library adds up in f32 differs with where a row lies in its
    # tile, which tensor cores' sums do not.
    left, right = (f"{code.full(operand)}.astype(f64)" for operand in (a, b))
    if str(op.attributes.get("inputPrecision", "ieee")).split(" ")[0] == "tf32":
        left, right = (
            f"tf32({code.full(operand)}).astype(f64)" if code.dtype(operand) == "f32" else text
            for text, operand in ((left, a), (right, b))
        )
    # np.dot has less to decide than np.matmul, and small tiles feel it.
    product = "np.dot" if len(op.result.type.shape) == 2 else "np.matmul"
    text = f"{product}({left}, {right}).astype(f32)"
    if not (code.known(c) is not None and np.all(code.known(c) == 0)):
        text += f" + {code.expr(c)}"
    code.set(op.result, text)
