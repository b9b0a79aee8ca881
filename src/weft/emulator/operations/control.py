"""scf.*, cf.*, calls and returns: TTIR's control flow as Python's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.base.errors import UnsupportedError
from weft.emulator.operations.indexing import Affine
from weft.emulator.operations.table import operation


@operation("scf.for")
def for_loop(code: Any, op: Any) -> None:
    """A counted loop with carried values."""
    region = op.regions[0]
    counter, *args = region.args
    lower, upper, step = (code.expr(value) for value in op.operands[:3])
    inits = op.operands[3:]
    bounds = "unsigned_loop_range" if "unsigned" in op.words else "loop_range"
    bounds = f"{bounds}({lower}, {upper}, {step}, {code.dtype(counter)})"

    def write(forms: list[_Carried]) -> list[_Carried]:
        for arg, init, form in zip(args, inits, forms, strict=True):
            form.enter(code, arg, init)
        code.bind(counter, ())
        code.line(f"for {code.expr(counter)} in {bounds}:")
        with code.indented():
            code.also_as_integer(counter)
            for arg, form in zip(args, forms, strict=True):
                form.begin(code, arg)
            carried = list(zip(forms, args, code.ops(region.ops), strict=True))
            wanted = [form.after(code, arg, value) for form, arg, value in carried]
            if wanted == forms:
                _assign(code, [form.step(code, arg, value) for form, arg, value in carried])
        return wanted

    forms = _settled(code, [_Carried.of(code, init) for init in inits], write)
    for result, arg, form in zip(op.results, args, forms, strict=True):
        form.leave(code, result, arg)


@dataclass(frozen=True)
class _Carried:
    """How a loop carries a value: with the extents `phys`, or as a start with fixed `steps`."""

    phys: tuple[int, ...]
    steps: tuple | None = None

    @classmethod
    def of(cls, code: Any, init: Any) -> _Carried:
        affine = code.held[init].affine
        return cls(code.phys(init), affine.get()[1] if affine is not None else None)

    def enter(self, code: Any, arg: Any, init: Any) -> None:
        if self.steps is None:
            value = code.shaped(init, self.phys)
            code.bind(arg, self.phys)
            code.line(f"{code.expr(arg)} = {value}")
        else:
            code.line(f"{code.variable(arg, 'at')} = {code.held[init].affine.get()[0]}")

    def begin(self, code: Any, arg: Any) -> None:
        if self.steps is None:
            code.also_as_integer(arg)
        else:
            self.hold(code, arg, code.variable(arg, "at"))

    def hold(self, code: Any, value: Any, start: str) -> None:
        """`value` is affine from `start` on; its tile is computed if it is needed."""
        steps = self.steps or ()
        text = f"({''.join(f'{step}, ' for step in steps)})"
        extents = tuple(
            extent if step != 0 else 1 for extent, step in zip(value.type.shape, steps, strict=True)
        )
        tile = f"affine_tile({start}, {text}, {extents}, {code.dtype(value)})"
        known = tuple(step if isinstance(step, int) else None for step in steps)
        affine = Affine(known, lambda: (start, steps))
        code.set_lazy(value, lambda: tile, extents, affine)

    def after(self, code: Any, arg: Any, value: Any) -> _Carried:
        """The form that also suits what the body hands on."""
        affine = code.held[value].affine
        if self.steps is not None and affine is not None and affine.get()[1] == self.steps:
            return self
        return _Carried(code.join(self.phys, code.phys(value)))

    def step(self, code: Any, arg: Any, value: Any) -> tuple[str, str]:
        if self.steps is None:
            return code.expr(arg), code.shaped(value, self.phys)
        return code.variable(arg, "at"), str(code.held[value].affine.get()[0])

    def leave(self, code: Any, result: Any, arg: Any) -> None:
        if self.steps is None:
            code.set(result, code.expr(arg), code.phys(arg))
        else:
            start = code.variable(result, "at")
            code.line(f"{start} = {code.variable(arg, 'at')}")
            self.hold(code, result, start)


@operation("scf.while")
def while_loop(code: Any, op: Any) -> None:
    """A loop that tests before each turn."""
    before, after = op.regions
    args, inits = before.args, op.operands

    def write(phys: list) -> list:
        _carry_in(code, args, inits, phys)
        turns = None if _touches_memory(op) else code.turn_counter(op)
        threads = code.pending()
        code.line("while True:")
        with code.indented():
            if turns is not None:
                code.count_turn(turns, op)
            condition, *passed = code.ops(before.ops)
            by_thread = code.is_per_thread(condition)
            test = code.expr(condition)
            code.line(f"if not {f'rt.narrow({test})' if by_thread else test}:")
            with code.indented():
                for result, value in zip(op.results, passed, strict=True):
                    code.set(result, code.expr(value), code.phys(value))
                code.line("break")
            _carry_on(code, after.args, passed, [code.phys(value) for value in passed], True)
            values = code.ops(after.ops)
            pairs = zip(phys, values, strict=True)
            wanted = [code.join(shape, code.phys(value)) for shape, value in pairs]
            if by_thread:  # each thread keeps what it had when it left
                wanted = [(code.names.num_threads,)] * len(values)
            if wanted == phys and by_thread:
                _merge(code, args, values)
            elif wanted == phys:
                _carry_on(code, args, values, phys)
        if by_thread:
            outer = _outer_threads(code, op, threads.add)
            code.line(f"rt.threads = {outer}")
        return wanted

    _settled(code, [code.phys(init) for init in inits], write)


def _settled(code: Any, forms: list, write: Any) -> list:
    """The forms of carried values with which `write(forms)` asks for no others: one may change in
    a loop (a splat becomes a tile), which is then written again with that."""
    while True:
        mark = code.mark()
        wanted = write(forms)
        if wanted == forms:
            return forms
        code.rollback(mark)
        forms = wanted


# A loop over one of these is seen by the scheduler, or by the check for plain spins.
_TOUCHES = ("tt.load", "tt.store", "tt.atomic", "tt.descriptor", "tt.call", "tt.extern", "ttng.")
_ACCESS = re.compile(r"\\b(ld|st|atom|red)\\.")


def _touches_memory(op: Any) -> bool:
    return any(
        inner.name.startswith(_TOUCHES)
        or (inner.name == "tt.elementwise_inline_asm" and _ACCESS.search(inner.strings[0]))
        or _touches_memory(inner)
        for region in op.regions
        for block in region.blocks
        for inner in block.ops
    )


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
    _assign(code, list(zip([code.expr(arg) for arg in args], right, strict=True)))


def _assign(code: Any, pairs: list[tuple[str, str]]) -> None:
    changed = [(a, b) for a, b in pairs if a != b]
    if changed:
        code.line(f"{', '.join(a for a, _ in changed)} = {', '.join(b for _, b in changed)}")


@operation("scf.if")
def branch(code: Any, op: Any) -> None:
    """A branch with results."""
    condition = code.expr(op.operands[0])
    if code.is_per_thread(op.operands[0]):
        _branch_by_thread(code, op, condition)
        return
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
        joined = [code.join(*shapes) for shapes in zip(*seen, strict=True)]
        if all(shapes == joined for shapes in seen):
            for result in op.results:
                code.also_as_integer(result)
            return
        code.rollback(mark)
        phys = joined


def _branch_by_thread(code: Any, op: Any, condition: str) -> None:
    """Both ways, each by the threads that go it; what it gives is each thread's own."""
    outer = _outer_threads(code, op, code.line)
    threads = (code.names.num_threads,)
    for result in op.results:
        code.bind(result, threads)
        code.line(f"{code.expr(result)} = {code.dtype(result)}.type(0)")
    for test, region in zip((condition, f"~{condition}"), op.regions, strict=False):
        code.line(f"if rt.narrow({test}):")
        with code.indented():
            _merge(code, op.results, code.ops(region.ops))
        code.line(f"rt.threads = {outer}")


def _outer_threads(code: Any, op: Any, write: Callable[[str], None]) -> str:
    """A variable that keeps which threads run where `write` writes."""
    outer = code.names.identifier(code.function.name, ("threads", id(op)), "threads")
    write(f"{outer} = rt.threads")
    return outer


def _merge(code: Any, into: list, values: list) -> None:
    """into = values, in the threads that run."""
    if any(value.type.is_tensor for value in values):
        raise UnsupportedError(
            "a tile comes out of a condition, or a loop, that holds for some threads of a program"
            " only; the emulator follows numbers through these",
            place=code.place,
        )
    news = [f"rt.merged({code.expr(a)}, {code.expr(b)})" for a, b in zip(into, values, strict=True)]
    _assign(code, list(zip(map(code.expr, into), news, strict=True)))


@operation("scf.execute_region")
def execute_region(code: Any, op: Any) -> None:
    """A region run in place."""
    values = code.ops(op.regions[0].ops)
    for result, value in zip(op.results, values, strict=True):
        code.set(result, code.expr(value), code.phys(value))


TERMINATORS = (
    "scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return", "ttg.warp_yield",
    "tt.map_elementwise.return",
)  # fmt: skip


@operation(*TERMINATORS)
def hand_on(code: Any, op: Any) -> None:
    """What a region gives: its operands are read by the operation around it; among blocks it
    leaves the function."""
    if code.among_blocks and op.name.startswith("tt."):
        code.line(f"return {', '.join(code.expr(value) for value in op.operands)}")


@operation("cf.br")
def jump(code: Any, op: Any) -> None:
    """Go to a block."""
    code.jump(*op.successors[0])


@operation("cf.cond_br")
def conditional_jump(code: Any, op: Any) -> None:
    """Go to one of two blocks: an early return."""
    code.line(f"if {code.expr(op.operands[0])}:")
    with code.indented():
        code.jump(*op.successors[0])
    code.line("else:")
    with code.indented():
        code.jump(*op.successors[1])


@operation("tt.return")
def leave(code: Any, op: Any) -> None:
    """Leave the function."""
    code.line(f"return {', '.join(code.full(value) for value in op.operands)}".rstrip())


@operation("tt.call")
def call(code: Any, op: Any) -> None:
    """Call a function that was not inlined."""
    symbol = next(word for word in op.words if word.startswith("@"))[1:].strip('"')
    args = ", ".join(["rt", *(code.full(operand) for operand in op.operands)])
    code.set_many(op.results, f"{code.names.functions[symbol]}({args})")
