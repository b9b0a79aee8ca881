"""scf.*, cf.*, calls and returns: TTIR's control flow as Python's."""

from __future__ import annotations

from typing import Any

from weft.emulator.operations.table import add, operation


@operation("scf.for", "a counted loop with carried values")
def for_loop(code: Any, op: Any) -> None:
    region = op.regions[0]
    counter, *args = region.args
    lower, upper, step = (code.expr(value) for value in op.operands[:3])
    inits = op.operands[3:]
    bounds = "unsigned_loop_range" if "unsigned" in op.words else "loop_range"
    bounds = f"{bounds}({lower}, {upper}, {step}, {code.dtype(counter)})"
    phys = [code.phys(init) for init in inits]
    while True:
        mark = code.mark()
        _carry_in(code, args, inits, phys)
        code.bind(counter, ())
        code.line(f"for {code.expr(counter)} in {bounds}:")
        with code.indented():
            values = code.ops(region.ops)
            wanted = _joined(code, phys, values)
            if wanted == phys:
                _carry_on(code, args, values, phys)
            if not region.ops:
                code.line("pass")
        if wanted == phys:
            break
        # A value grows in the loop (a splat becomes a tile): start again with it grown.
        code.rollback(mark)
        phys = wanted
    for result, arg in zip(op.results, args, strict=True):
        code.set(result, code.expr(arg), code.phys(arg))


@operation("scf.while", "a loop that tests before each turn")
def while_loop(code: Any, op: Any) -> None:
    before, after = op.regions
    args, inits = before.args, op.operands
    phys = [code.phys(init) for init in inits]
    while True:
        mark = code.mark()
        _carry_in(code, args, inits, phys)
        code.line("while True:")
        with code.indented():
            condition, *passed = code.ops(before.ops)
            code.line(f"if not {code.expr(condition)}:")
            with code.indented():
                for result, value in zip(op.results, passed, strict=True):
                    code.set(result, code.expr(value), code.phys(value))
                code.line("break")
            _carry_on(code, after.args, passed, [code.phys(value) for value in passed], True)
            values = code.ops(after.ops)
            wanted = _joined(code, phys, values)
            if wanted == phys:
                _carry_on(code, args, values, phys)
        if wanted == phys:
            break
        code.rollback(mark)
        phys = wanted


def _carry_in(code: Any, args: list, inits: list, phys: list) -> None:
    for arg, init, shape in zip(args, inits, phys, strict=True):
        value = code.shaped(init, shape)
        code.bind(arg, shape)
        code.line(f"{code.expr(arg)} = {value}")


def _carry_on(code: Any, args: list, values: list, phys: list, bind: bool = False) -> None:
    """args = values, all at once."""
    right = [code.shaped(value, shape) for value, shape in zip(values, phys, strict=True)]
    if bind:
        for arg, shape in zip(args, phys, strict=True):
            code.bind(arg, shape)
    left = [code.expr(arg) for arg in args]
    changed = [(a, b) for a, b in zip(left, right, strict=True) if a != b]
    if changed:
        code.line(f"{', '.join(a for a, _ in changed)} = {', '.join(b for _, b in changed)}")


def _joined(code: Any, phys: list, values: list) -> list:
    return [code.join(shape, code.phys(value)) for shape, value in zip(phys, values, strict=True)]


@operation("scf.if", "a branch with results")
def branch(code: Any, op: Any) -> None:
    condition = code.expr(op.operands[0])
    phys: list | None = None
    while True:
        mark = code.mark()
        seen = []
        for word, region in zip((f"if {condition}:", "else:"), op.regions, strict=False):
            code.line(word)
            with code.indented():
                values = code.ops(region.ops)
                shapes = phys or [code.phys(value) for value in values]
                for result, value, shape in zip(op.results, values, shapes, strict=True):
                    code.bind(result, shape)
                    code.line(f"{code.expr(result)} = {code.shaped(value, shape)}")
                seen.append(shapes)
                if not op.results:
                    code.line("pass")
        joined = [code.join(*shapes) for shapes in zip(*seen, strict=True)]
        if all(shapes == joined for shapes in seen):
            return
        code.rollback(mark)
        phys = joined


@operation("scf.execute_region", "a region run in place")
def execute_region(code: Any, op: Any) -> None:
    values = code.ops(op.regions[0].ops)
    for result, value in zip(op.results, values, strict=True):
        code.set(result, code.expr(value), code.phys(value))


TERMINATORS = {
    "scf.yield": "what a region hands on",
    "scf.condition": "whether a while loop goes on, and with what",
    "tt.reduce.return": "what a reduction's function gives",
    "tt.scan.return": "what a scan's function gives",
    "tt.map_elementwise.return": "what a mapped function gives",
}


def _terminator(code: Any, op: Any) -> None:
    """Its operands are read by the operation around it."""


for _name, _summary in TERMINATORS.items():
    add(_name, _summary, _terminator)


@operation("cf.br", "go to a block")
def jump(code: Any, op: Any) -> None:
    code.jump(*op.successors[0])


@operation("cf.cond_br", "go to one of two blocks: an early return")
def conditional_jump(code: Any, op: Any) -> None:
    code.line(f"if {code.expr(op.operands[0])}:")
    with code.indented():
        code.jump(*op.successors[0])
    code.line("else:")
    with code.indented():
        code.jump(*op.successors[1])


@operation("tt.return", "leave the function")
def leave(code: Any, op: Any) -> None:
    code.line(f"return {', '.join(code.full(value) for value in op.operands)}".rstrip())


@operation("tt.call", "call a function that was not inlined")
def call(code: Any, op: Any) -> None:
    symbol = next(word for word in op.words if word.startswith("@"))[1:].strip('"')
    args = ", ".join(["rt", *(code.full(operand) for operand in op.operands)])
    code.set_many(op.results, f"{code.function_name(symbol)}({args})")
