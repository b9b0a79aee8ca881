"""tt.*: memory, atomics, descriptors, and what leaves the kernel. All of it is the runtime's."""

from __future__ import annotations

from typing import Any

from weft.base.errors import UnsupportedError
from weft.emulator.inline_ptx import read_assembly
from weft.emulator.nvshmem import FUNCTIONS as NVSHMEM
from weft.emulator.operations.functions import PAIRS, libdevice_template
from weft.emulator.operations.table import operation


@operation("tt.load")
def load(code: Any, op: Any) -> None:
    """Read memory; masked elements are `other`."""
    pointer, mask, other = (*op.operands, None, None)[:3]
    dtype = code.constant_dtype(code.pointee(pointer))
    pointers, chosen = where(code, pointer, mask)
    shape = op.result.type.shape
    if code.is_per_thread(pointer):
        chosen, shape = f"rt.on({chosen})", code.phys(pointer)
    call = (
        f"rt.load({pointers}, {chosen}, {'None' if other is None else code.expr(other)}, "
        f"{dtype}, {shape}, {code.loc(op)}"
    )
    code.set(op.result, call + (", True)" if op.flag("isVolatile") else ")"), shape)


@operation("tt.store")
def store(code: Any, op: Any) -> None:
    """Write memory where the mask holds."""
    pointer, value, mask = (*op.operands, None)[:3]
    pointers, chosen = where(code, pointer, mask)
    dtype = code.constant_dtype(code.pointee(pointer))
    call_runtime(code, op, "store", pointers, value, chosen, dtype, value.type.shape)


def call_runtime(code: Any, op: Any, method: str, *words: Any) -> None:
    """The runtime's method with these words, operands of `op` among them, and the location."""
    texts = [code.expr(word) if word in op.operands else str(word) for word in words]
    text = f"rt.{method}({', '.join([*texts, str(code.loc(op))])})"
    if op.results and op.result.type.text not in ("none", "!ttg.async.token"):
        code.set(op.result, text, () if op.result.type.element == "memdesc" else None)
    else:
        code.line(text)
        for token in op.results:
            code.bind(token, ())


def where(code: Any, pointer: Any, mask: Any) -> tuple[str, str]:
    """Pointers and mask: as integers where both have that form, else as tiles."""
    affine = code.held[pointer].affine
    always = code.mask(mask) == "None" if mask is None or code.known(mask) is not None else False
    box = code.held[mask].box if mask is not None else None
    if affine is None or not (always or box is not None):
        return code.expr(pointer), code.mask(mask)
    shape = pointer.type.shape
    start, steps = affine.get()
    pointers = f"AffinePointers({start}, ({''.join(f'{step}, ' for step in steps)}), {shape})"
    if always:
        return pointers, "None"
    pairs = [pair or (0, extent) for pair, extent in zip(box.get(), shape, strict=True)]
    return pointers, f"({''.join(f'({first}, {end}), ' for first, end in pairs)})"


@operation("tt.atomic_rmw")
def atomic_rmw(code: Any, op: Any) -> None:
    """Read, change and write as one; gives the old value."""
    kind, order, scope = map(repr, op.words[:3])
    pointer, value, mask = (*op.operands, None)[:3]
    dtype = code.constant_dtype(code.pointee(pointer))
    rest = (order, scope, pointer, value, code.mask(mask), dtype, op.result.type.shape)
    if op.words[0] == "add" and op.result not in code.used and not op.result.type.is_tensor:
        call_runtime(code, op, "atomic_red", *rest)
    else:
        call_runtime(code, op, "atomic_rmw", kind, *rest)


@operation("tt.atomic_cas")
def atomic_cas(code: Any, op: Any) -> None:
    """Write if memory holds what was expected; gives the old value."""
    order, scope = map(repr, op.words[:2])
    dtype = code.constant_dtype(code.pointee(op.operands[0]))
    call_runtime(code, op, "atomic_cas", order, scope, *op.operands, dtype, op.result.type.shape)


# Triton 3.9's atomic accesses are weft's own, element by element.


@operation("tt.atomic_load")
def atomic_load(code: Any, op: Any) -> None:
    """Atomic read."""
    order, scope = op.words[:2]
    pointer, mask = (*op.operands, None)[:2]
    dtype = code.constant_dtype(code.pointee(pointer))
    access = f"lambda p: rt.extern('weft.load:{order}.{scope}', (p,), {dtype}, (), {code.loc(op)})"
    code.set(op.result, _each(code, access, dtype, op.result.type.shape, mask, [pointer]))


@operation("tt.atomic_store")
def atomic_store(code: Any, op: Any) -> None:
    """Atomic write."""
    order, scope = op.words[:2]
    pointer, value, mask = (*op.operands, None)[:3]
    access = (
        f"lambda p, v: rt.extern('weft.store:{order}.{scope}', (p, v), i32, (), {code.loc(op)})"
    )
    code.line(_each(code, access, "i32", value.type.shape, mask, [pointer, value]))


def _each(code: Any, access: str, dtype: str, shape: tuple, mask: Any, operands: list) -> str:
    values = ", ".join(code.expr(value) for value in operands)
    return f"each_element({access}, {dtype}, {shape}, {code.mask(mask)}, {values})"


# ---------------------------------------------------------------------------------------------
# Descriptors


@operation("tt.make_tensor_descriptor")
def make_descriptor(code: Any, op: Any) -> None:
    """A tensor in memory, seen as blocks."""
    base, *rest = op.operands
    rank = len(rest) // 2
    sizes, strides = (
        ", ".join(code.expr(value) for value in part) for part in (rest[:rank], rest[rank:])
    )
    kind = op.result.type
    dtype = code.constant_dtype(code.pointee(base))
    padding = str(op.attributes.get("padding", "zero"))
    padding = "nan" if "nan" in padding.lower() or padding.startswith("2") else "zero"
    code.set(
        op.result,
        f"rt.make_descriptor({code.expr(base)}, ({sizes},), ({strides},), {kind.shape}, "
        f"{dtype}, {padding!r}, {code.loc(op)})",
        (),
    )


@operation("tt.descriptor_load", "tt.descriptor_store", "tt.descriptor_reduce")
def access_block(code: Any, op: Any) -> None:
    """Blocks at indices: what lies outside reads as padding, and is not written. Stores, and
    reductions (add, min, max, and, or, xor), are asynchronous."""
    method = op.name.removeprefix("tt.")
    descriptor, *indices = op.operands
    what = op.result.type.shape if op.results else code.full(indices.pop())
    kind = [repr(op.words[0])] if method == "descriptor_reduce" else []
    call_runtime(code, op, method, *kind, descriptor, _tuple(code, indices), what)


def _tuple(code: Any, values: list) -> str:
    inner = ", ".join(code.expr(value) for value in values)
    return f"({inner},)" if len(values) == 1 else f"({inner})"


# ---------------------------------------------------------------------------------------------
# What leaves the kernel


@operation("tt.extern_elementwise")
def extern(code: Any, op: Any) -> None:
    """Weft's primitives, and the functions of libdevice."""
    symbol = str(op.attributes.get("symbol", ""))
    if symbol.startswith("weft.") or symbol in NVSHMEM:
        args = _tuple(code, op.operands)
        call_runtime(
            code, op, "extern", repr(symbol), args, code.dtype(op.result), op.result.type.shape
        )
        return
    template = libdevice_template(symbol) if symbol.startswith("__nv_") else None
    if template is None:
        raise UnsupportedError(
            f"the emulator does not know the external function {symbol!r}; "
            "see docs/emulator.md for those it does",
            place=op.place,
        )
    code.elementwise(op, template)


@operation("tt.elementwise_inline_asm")
def inline_asm(code: Any, op: Any) -> None:
    """PTX for synchronising, an element at a time; and for pairs of floats."""
    if templates := PAIRS.get(" ".join(op.strings[0].split())):
        for result, template in zip(op.results, templates, strict=True):
            text = template.format(*map(code.full, op.operands))
            code.set(result, text)
        return
    try:
        if op.integer("packed_element", 1) != 1:
            raise UnsupportedError(
                "inline assembly on packed elements is not emulated; pass pack=1"
            )
        assembly = read_assembly(op.strings[0], op.attributes["constraints"].strip('"'))
    except UnsupportedError as error:
        raise UnsupportedError(error.message, place=op.place) from None
    shape = op.results[0].type.shape if op.results else ()
    differs = assembly.differs or any(map(code.is_per_thread, op.operands))
    kinds = "".join(f"{code.dtype(result)}, " for result in op.results)
    operands = "".join(f"{code.expr(operand)}, " for operand in op.operands)
    for number, result in enumerate(op.results):
        by_thread = not shape and differs and number in assembly.written
        code.bind(result, (code.names.num_threads,) if by_thread else shape)
    names = "".join(f"{code.expr(result)}, " for result in op.results)
    code.line(
        f"{names}= rt.assembly({code.names.assembly(assembly)}, {assembly.accesses}, ({operands}),"
        f" {shape}, ({kinds}), {code.loc(op)})"
    )
    for result in op.results:
        code.also_as_integer(result)


@operation("tt.assert")
def device_assert(code: Any, op: Any) -> None:
    """Stop with a message where the condition fails."""
    message = op.strings[0] if op.strings else ""
    code.line(f"rt.assert_({code.expr(op.operands[0])}, {message!r}, {code.loc(op)})")


@operation("tt.print")
def device_print(code: Any, op: Any) -> None:
    """Print values."""
    prefix = op.strings[0] if op.strings else ""
    code.line(f"rt.print_({prefix!r}, {_tuple(code, op.operands)}, {code.loc(op)})")


@operation(
    "gpu.barrier", "ttg.barrier", "ttg.local_barrier", "tt.grid_dependency_wait",
    "tt.grid_dependency_launch_dependents", "llvm.intr.assume",
)  # fmt: skip
def nothing(code: Any, op: Any) -> None:
    """A program is one thread here, a stream is in order, and a hint to the compiler is none."""
