"""Waits that are not there any more when a kernel runs: loops on plain loads, which nothing keeps a
compiler from removing. Triton does so itself, on its way to the TTIR that all targets start from.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from weft.base.place import Place
from weft.base.report import Finding
from weft.emulator.rewriting import parsed
from weft.ir.ttir import Op, Value


def report_removed_waits(context: Any, launch: Any) -> None:
    """Report the waits of the kernel that `launch` starts that were removed from it."""
    findings = context.machine.checker.findings
    for place in removed_waits(launch.written, launch.text):
        side = findings.side(
            None, place, rank=context.rank, kernel=launch.jit_function.fn.__name__, note="waits"
        )
        findings.find(
            Finding(
                "plain spin",
                "Triton has removed this wait from the kernel: a loop of plain loads changes"
                " nothing, so nothing waits here",
                side,
                remedy="wait with wl.wait, or poll with an acquire atomic",
            )
        )


@lru_cache(maxsize=256)
def removed_waits(written: str, text: str) -> tuple[Place, ...]:
    """Where a loop in `written` waits for what a plain load gives, and `text` has no such loop."""
    # By the innermost line: in `text` the functions that `written` calls are inlined.
    left = {op.chain[:1] for loop in _loops(text) for op in loop.inside()}
    awaited = [load for loop in _loops(written) if (load := _awaited(loop)) is not None]
    return tuple(load.place for load in awaited if load.chain[:1] not in left)


def _loops(text: str) -> Iterator[Op]:
    for function in parsed(text).functions.values():
        yield from (op for op in function.body.walk() if op.name == "scf.while")


def _awaited(loop: Op) -> Op | None:
    """The plain load of one word in `loop` on which it depends whether that goes on."""
    before, after = loop.regions
    makers = {id(value): op for op in loop.inside() for value in op.results}
    carried: dict[int, Value] = {}  # an argument's value comes from the other region's end
    condition, again = before.ops[-1], after.ops[-1]
    for argument, value in zip(before.args, again.operands, strict=False):
        carried[id(argument)] = value
    for argument, value in zip(after.args, condition.operands[1:], strict=False):
        carried[id(argument)] = value
    todo, seen = [condition.operands[0]], set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        op = makers.get(id(value))
        if op is not None and op.name == "tt.load" and op.result.type.shape == ():
            return op
        if op is not None:
            todo += op.operands
        elif id(value) in carried:
            todo.append(carried[id(value)])
    return None
