"""What a kernel may still do, read from its generated code: which lines wait, which ones signal.

For a deadlock: could anybody who is left have signalled? A program is at a line of its kernel's
Python; what can still be reached from there are the statements that follow, in its block and in
those around it, and a loop around it once more from its top. Which arrays a signal may be for is
known from the kernel's parameters that its address is computed from.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

from weft.base.place import Place
from weft.emulator.codegen import EmulatedKernel
from weft.emulator.memory import Allocation, Memory
from weft.language.symbols import base_symbol, with_trait

_LOOKS, _SIGNALS = with_trait("looks"), with_trait("signals")
_ATOMICS = ("atomic_rmw", "atomic_cas")
# What gives an address back as it was, or a peer's address of the same word.
_ADDRESSES = ("weft.at", "weft.translate")
READ = "*"

# The words of a world that its table leads to, and no argument of a kernel.
_BY_TABLE = "barrier_arrivals"


@dataclass(frozen=True)
class Site:
    """One call in a kernel's code; `roots` are the parameters behind its address, those that only
    lead to memory from which it is computed with READ before the name."""

    place: Place
    line: int
    looks: bool
    signals: bool
    roots: frozenset[str]


def wait_places(kernel: EmulatedKernel) -> list[Place]:
    """Where the kernel looks at words that others may change."""
    return [site.place for site in _sites(kernel) if site.looks]


def signals_ahead(
    kernel: EmulatedKernel, args: Sequence[Any], awaited: Allocation, memory: Memory,
    frame: FrameType | None,
) -> list[Place]:  # fmt: skip
    """Where a program that is set aside, at `frame`, may still signal words of `awaited`."""
    ahead: set[int] = set()
    filename = inspect.unwrap(kernel.function).__code__.co_filename
    while frame is not None:
        if frame.f_code.co_filename == filename:
            ahead |= lines_ahead(kernel, frame.f_lineno)
        frame = frame.f_back
    return _signals(kernel, args, awaited, memory, ahead)


def signals_of(
    kernel: EmulatedKernel, args: Sequence[Any], awaited: Allocation, memory: Memory
) -> list[Place]:
    """Where a launch that has not begun may signal words of `awaited`."""
    return _signals(kernel, args, awaited, memory, None)


def _signals(
    kernel: EmulatedKernel, args: Sequence[Any], awaited: Allocation, memory: Memory,
    lines: set[int] | None,
) -> list[Place]:  # fmt: skip
    values = dict(zip(_parameters(kernel), args, strict=False))
    return [
        site.place
        for site in _sites(kernel)
        if site.signals
        and (lines is None or site.line in lines)
        and _may_be(site, awaited, values, memory)
    ]


def _may_be(site: Site, awaited: Allocation, values: dict[str, Any], memory: Memory) -> bool:
    """Can the address that is computed from these parameters be a word of `awaited`?"""
    pointers = [a for root in site.roots if (a := _allocation(values.get(root), memory))]
    if pointers:
        places = [(a.heap, a.heap_offset) for a in pointers if a.heap_offset is not None]
        return awaited in pointers or (awaited.heap, awaited.heap_offset) in places
    # An address from a table: the world's own leads to its barrier, another one anywhere.
    tables = [_allocation(values.get(root.removeprefix(READ)), memory) for root in site.roots]
    tables_only = any(tables) and all(a.name == "world_table" for a in tables if a is not None)
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
    calls = list(_calls(tree))
    roots = _Roots(tree, frozenset(_parameters(kernel)), [address for *_, address in calls])
    return tuple(
        Site(kernel.locations[_number(call)], call.lineno, looks, signals, roots.of(address))
        for call, looks, signals, address in calls
    )


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, bool, bool, ast.expr]]:
    """(call, looks, signals, address) for every access to words that others use."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr == "extern":
            name = _symbol(node)
            if name in _LOOKS or name in _SIGNALS:
                yield node, name in _LOOKS, name in _SIGNALS, _first(node)
        elif node.func.attr in _ATOMICS:
            yield node, True, True, node.args[3 if node.func.attr == "atomic_rmw" else 2]
        elif node.func.attr == "atomic_red":
            yield node, False, True, node.args[2]
        elif node.func.attr == "assembly":
            accesses = set(ast.literal_eval(node.args[1]))
            if accesses:
                looks, signals = accesses & {"ld", "atom"}, accesses & {"st", "atom", "red"}
                yield node, bool(looks), bool(signals), node.args[2]
        elif node.func.attr == "load" and _is_volatile(node):
            yield node, True, False, node.args[0]


def _is_volatile(call: ast.Call) -> bool:
    return len(call.args) > 6 or any(word.arg == "volatile" for word in call.keywords)


def _number(call: ast.Call) -> int:
    """The location that generated code passes last."""
    numbers = [a.value for a in call.args if isinstance(a, ast.Constant) and type(a.value) is int]
    return numbers[-1]


Known = dict[str, frozenset[str]]


class _Roots:
    """From which parameters each of `asked` is computed, by the assignments that reach it: names
    of generated code come again in other blocks."""

    def __init__(self, tree: ast.Module, parameters: frozenset[str], asked: list[ast.expr]) -> None:
        self._lines: dict[int, list[ast.expr]] = {}
        for address in asked:
            self._lines.setdefault(address.lineno, []).append(address)
        self._found: dict[ast.expr, frozenset[str]] = dict.fromkeys(asked, frozenset())
        self._block(tree.body, {name: frozenset({name}) for name in parameters})

    def of(self, address: ast.expr) -> frozenset[str]:
        return self._found[address]

    def _block(self, body: list[ast.stmt], known: Known) -> Known:
        """What is known behind these statements; `known` is changed."""
        for statement in body:
            self._statement(statement, known)
        return known

    def _statement(self, statement: ast.stmt, known: Known) -> None:
        for line in range(statement.lineno, _own_end(statement) + 1):
            for address in self._lines.get(line, ()):
                self._found[address] |= _roots_of(address, known)
        if isinstance(statement, ast.FunctionDef):
            self._block(statement.body, dict(known))
        elif isinstance(statement, (ast.Assign, ast.AugAssign)):
            roots = _roots_of(statement.value, known)
            for target in getattr(statement, "targets", None) or [statement.target]:
                for name in _names(target):
                    known[name] = roots
        elif isinstance(statement, (ast.For, ast.While)):
            self._loop(statement, known)
        else:
            branches = [self._block(block, dict(known)) for block in _blocks(statement) if block]
            for branch in branches:
                _join(known, branch)

    def _loop(self, statement: ast.For | ast.While, known: Known) -> None:
        before: Known | None = None
        while known != before:
            before = dict(known)
            if isinstance(statement, ast.For):
                for name in _names(statement.target):
                    known[name] = known.get(name, frozenset()) | _roots_of(statement.iter, known)
            _join(known, self._block(statement.body, dict(known)))


def _join(known: Known, other: Known) -> None:
    for name, roots in other.items():
        known[name] = known.get(name, frozenset()) | roots


def _roots_of(value: ast.AST, known: Known) -> frozenset[str]:
    if isinstance(value, ast.Name):
        return known.get(value.id, frozenset())
    name = ""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        name = value.func.attr
        if name == "extern" and _symbol(value) in _ADDRESSES:
            return _roots_of(_first(value), known)
    inner = (_roots_of(node, known) for node in ast.iter_child_nodes(value))
    roots = frozenset[str]().union(*inner)
    if name in ("extern", "load", *_ATOMICS):  # what memory holds
        return frozenset(READ + root.removeprefix(READ) for root in roots)
    return roots


def _symbol(extern: ast.Call) -> str:
    return base_symbol(str(getattr(extern.args[0], "value", "")))


def _first(extern: ast.Call) -> ast.expr:
    assert isinstance(extern.args[1], ast.Tuple)
    return extern.args[1].elts[0]


def _own_end(statement: ast.stmt) -> int:
    """The last line of what a statement says before its blocks, if it has any."""
    blocks = [block[0].lineno for block in _blocks(statement) if block]
    return min(blocks) - 1 if blocks else statement.end_lineno or statement.lineno


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def lines_ahead(kernel: EmulatedKernel, line: int) -> set[int]:
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
