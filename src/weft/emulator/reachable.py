"""What a kernel may still do, read from its generated code: which lines wait, which ones signal.

For a standstill: could anybody who is left have signalled? A program is at a line of its kernel's
Python; what can still be reached from there are the statements that follow, in its block and in
those around it, and a loop around it once more from its top. Which arrays a signal may be for is
told by the kernel's parameters that its address is computed from.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from weft.base.place import Place
from weft.language.symbols import base_symbol, with_trait

if TYPE_CHECKING:
    from weft.emulator.codegen import EmulatedKernel
    from weft.emulator.memory import Allocation, Memory
    from weft.emulator.programs import Program
    from weft.emulator.streams import KernelWork

_LOOKS, _SIGNALS = with_trait("looks"), with_trait("signals")
_ATOMICS = ("atomic_rmw", "atomic_cas")

# The words of a world that its table leads to, and no argument of a kernel.
_BY_TABLE = "barrier_arrivals"


@dataclass(frozen=True)
class Site:
    """One call in a kernel's code; `roots` are the parameters behind its address."""

    place: Place
    line: int
    looks: bool
    signals: bool
    roots: frozenset[str]


def wait_places(kernel: EmulatedKernel) -> list[Place]:
    """Where the kernel looks at words that others may change."""
    return [site.place for site in _sites(kernel) if site.looks]


def signals_ahead(program: Program, awaited: Allocation) -> list[Place]:
    """Where a program that is set aside may still signal words of `awaited`, once it goes on."""
    kernel = program.work.kernel
    ahead: set[int] = set()
    frame = program.coroutine.gr_frame
    filename = inspect.unwrap(kernel.function).__code__.co_filename
    while frame is not None:
        if frame.f_code.co_filename == filename:
            ahead |= _lines_ahead(kernel, frame.f_lineno)
        frame = frame.f_back
    return _signals(program.work, awaited, program.memory, ahead)


def signals_of(work: KernelWork, awaited: Allocation, memory: Memory) -> list[Place]:
    """Where a launch that has not begun may signal words of `awaited`."""
    return _signals(work, awaited, memory, None)


def _signals(
    work: KernelWork, awaited: Allocation, memory: Memory, lines: set[int] | None
) -> list[Place]:
    kernel = work.kernel
    values = dict(zip(_parameters(kernel), work.args, strict=False))
    return [
        site.place
        for site in _sites(kernel)
        if site.signals
        and (lines is None or site.line in lines)
        and _may_be(site, awaited, values, memory)
    ]


def _may_be(site: Site, awaited: Allocation, values: dict[str, Any], memory: Memory) -> bool:
    """Can the address that is computed from these parameters be a word of `awaited`?"""
    behind = [_allocation(values.get(root), memory) for root in site.roots]
    symmetric = [a for a in behind if a is not None and a.heap_offset is not None]
    if any(a.heap_offset == awaited.heap_offset and a.heap == awaited.heap for a in symmetric):
        return True
    local = [a for a in behind if a is not None and a.heap_offset is None]
    if awaited in local:
        return True
    if symmetric:
        return False
    # An address from a table: the world's own leads to its barrier, another one anywhere.
    tables_only = bool(local) and all(a.name == "world_table" for a in local)
    return awaited.name == _BY_TABLE if tables_only else awaited.heap_offset is not None


def _allocation(value: Any, memory: Memory) -> Allocation | None:
    try:
        return memory.find(int(value))
    except (TypeError, ValueError):
        base = getattr(value, "base", None)  # a descriptor
        return None if base is None else memory.find(int(base))


# ---------------------------------------------------------------------------------------------
# Reading generated code


@lru_cache(maxsize=8)  # a tree takes a hundred times its text's memory
def _tree(kernel: EmulatedKernel) -> ast.Module:
    return ast.parse(kernel.source)


def _parameters(kernel: EmulatedKernel) -> tuple[str, ...]:
    """Their names in the generated code, which knows no dots: Triton 3.9 has `world.table`."""
    return tuple(re.sub(r"\W", "_", parameter.name) for parameter in kernel.parameters)


@lru_cache(maxsize=64)
def _sites(kernel: EmulatedKernel) -> tuple[Site, ...]:
    tree = _tree(kernel)
    roots = _Roots(tree, frozenset(_parameters(kernel)))
    return tuple(
        Site(kernel.locations[_number(call)], call.lineno, looks, signals, roots.of(address))
        for call, looks, signals, address in _calls(tree)
    )


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, bool, bool, ast.expr]]:
    """(call, looks, signals, address) for every access to words that others use."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr == "extern":
            name = base_symbol(str(getattr(node.args[0], "value", "")))
            arguments = node.args[1]
            if name in _LOOKS or name in _SIGNALS:
                assert isinstance(arguments, ast.Tuple)
                yield node, name in _LOOKS, name in _SIGNALS, arguments.elts[0]
        elif node.func.attr in _ATOMICS:
            yield node, True, True, node.args[3 if node.func.attr == "atomic_rmw" else 2]
        elif node.func.attr == "load" and _is_volatile(node):
            yield node, True, False, node.args[0]


def _is_volatile(call: ast.Call) -> bool:
    return len(call.args) > 6 or any(word.arg == "volatile" for word in call.keywords)


def _number(call: ast.Call) -> int:
    """The location that generated code passes last."""
    numbers = [a.value for a in call.args if isinstance(a, ast.Constant) and type(a.value) is int]
    return numbers[-1]


class _Roots:
    """From which parameters a value is computed: every assignment counts, whatever its place."""

    def __init__(self, tree: ast.Module, parameters: frozenset[str]) -> None:
        self.parameters = parameters
        self._sources: dict[str, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.For)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                value = node.iter if isinstance(node, ast.For) else node.value
                names = _names(value)
                for target in targets:
                    for name in _names(target):
                        self._sources.setdefault(name, set()).update(names)

    def of(self, address: ast.expr) -> frozenset[str]:
        found: set[str] = set()
        left = list(_names(address))
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += self._sources.get(name, ())
        return self.parameters & found


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _lines_ahead(kernel: EmulatedKernel, line: int) -> set[int]:
    """The lines of its code that can still run once `line` has ended."""
    lines: set[int] = set()
    for statement in _ahead(_tree(kernel).body, line):
        lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def _ahead(body: list[ast.stmt], line: int) -> Iterator[ast.stmt]:
    for index, statement in enumerate(body):
        if not statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            continue
        for inner in _blocks(statement):
            yield from _ahead(inner, line)
        if isinstance(statement, (ast.For, ast.While)):
            yield statement
        if not isinstance(statement, ast.FunctionDef):
            yield from body[index + 1 :]
        return


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse"):
        yield getattr(statement, name, [])
