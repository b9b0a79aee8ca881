"""A Python file as lint reads it: what names mean, which functions run on a device, who calls whom.

Nothing of it is run or imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from weft.verify.lint.signatures import LANGUAGE, signatures

SHORT = {
    "triton.language": "tl",
    "triton.language.core": "tl",
    "weft.language": "wl",
    "triton.experimental.gluon.language": "gl",
}
# What files import under a condition, or from a place that lint does not see.
USUAL = {"tl": "triton.language", "wl": "weft.language", "triton": "triton", "weft": "weft"}
JIT = {"triton.jit", "triton.experimental.gluon.jit", "gluon.jit", "triton.runtime.jit.jit"}


@dataclass(eq=False)
class Device:
    """A `@triton.jit` function of the file `source`."""

    node: ast.FunctionDef
    source: Source
    calls: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def parameters(self) -> list[ast.arg]:
        args = self.node.args
        return [*args.posonlyargs, *args.args, *args.kwonlyargs]

    @property
    def names(self) -> list[str]:
        return [arg.arg for arg in self.parameters]

    def is_constexpr(self, name: str) -> bool:
        for arg in self.parameters:
            if arg.arg == name and arg.annotation is not None:
                return "constexpr" in ast.unparse(arg.annotation)
        return False


@dataclass(eq=False)
class Source:
    """One parsed file."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> Source:
        """Raises  SyntaxError: it is no Python"""
        return cls(path, text, ast.parse(text, path))

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def line(self, number: int) -> str:
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @cached_property
    def imports(self) -> dict[str, str]:
        """What each imported name stands for, in full: {"tl": "triton.language"}."""
        names = dict(USUAL)
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    names[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                # A relative import is looked for from this file's folder upwards.
                module = f"{node.module}." if node.module else ""
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{module}{alias.name}"
        return names

    def spelling(self, node: ast.AST) -> str:
        """A dotted name with its import written out, then shortened: "tl.load"; "" for others."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        full = ".".join([self.imports.get(node.id, node.id), *reversed(parts)])
        for module, short in SHORT.items():
            if full.startswith(module + "."):
                rest = full[len(module) + 1 :].split(".")
                # weft.language.slots.slot_epoch is wl.slot_epoch.
                if short == "wl" and len(rest) == 2 and rest[1] in signatures():
                    rest = rest[1:]
                return ".".join([short, *rest])
        return full

    def device(self, name: str, depth: int = 0) -> Device | None:
        """The device function that a spelling means, here or in a file beside this one."""
        if name in self.devices:
            return self.devices[name]
        found = self.elsewhere(name) if depth < 4 else None
        if found is None:
            return None
        source, function = found
        # A package hands on what its files define.
        there = function if function in source.devices else source.imports.get(function, "")
        return source.device(there, depth + 1) if there else None

    def elsewhere(self, name: str) -> tuple[Source, str] | None:
        """The file that defines `name`, spelled in full, and its name there: read, never run."""
        module, _, function = name.rpartition(".")
        if not module or module.split(".")[0] in ("tl", "wl", "gl", "triton", "torch"):
            return None
        path = self.file_of(module)
        source = read(path) if path is not None else None
        return (source, function) if source is not None and source.path != self.path else None

    def file_of(self, module: str) -> Path | None:
        """The file of a module, looked for from this file's folder upwards, then in weft."""
        return _file_of(module, Path(self.path).resolve().parent)

    @cached_property
    def devices(self) -> dict[str, Device]:
        """The device functions by name, also those defined within other functions."""
        found: dict[str, Device] = {}
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef) and self._is_jit(node):
                found[node.name] = Device(node, self)
        for device in found.values():
            for node in ast.walk(device.node):
                # A hook is handed over by name: naming it counts as calling it.
                if isinstance(node, ast.Name) and node.id in found and node.id != device.name:
                    device.calls.add(node.id)
        return found

    def _is_jit(self, node: ast.FunctionDef) -> bool:
        for decorator in node.decorator_list:
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            if self.spelling(target) in JIT:
                return True
        return False

    @cached_property
    def constants(self) -> dict[str, object]:
        """Literals bound to names at the top of the file, tl.constexpr(...) included."""
        found: dict[str, object] = {}
        for node in self.tree.body:
            for name, value in _bindings(node):
                constant = self.constant(value, found)
                if constant is not None:
                    found[name] = constant
        return found

    def constant(self, node: ast.AST, names: dict[str, object]) -> object:
        """The literal that `node` is, as far as it is one; else None."""
        if isinstance(node, ast.Call) and self.spelling(node.func) == "tl.constexpr" and node.args:
            return self.constant(node.args[0], names)
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.BinOp):
            left, right = self.constant(node.left, names), self.constant(node.right, names)
            if isinstance(left, int) and isinstance(right, int):
                return fold(node.op, left, right)
            return None
        try:
            return ast.literal_eval(node)  # type: ignore[arg-type]
        except (ValueError, SyntaxError, TypeError):
            return None

    @cached_property
    def records(self) -> dict[str, list[str]]:
        """Named tuples that the file defines: their fields in order."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).split(".")[-1] == "NamedTuple" for base in node.bases
            ):
                found[node.name] = [
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                ]
        return found


@cache
def _file_of(module: str, folder: Path) -> Path | None:
    relative = Path(*module.split("."))
    for place in (folder, *list(folder.parents)[:4], LANGUAGE.parents[1]):
        for path in (place / relative.with_suffix(".py"), place / relative / "__init__.py"):
            if path.is_file():
                return path
    return None


@cache
def read(path: Path) -> Source | None:
    """A file that another one imports; None where it cannot be read."""
    try:
        return Source.parse(str(path), path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
        yield node.target.id, node.value
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if isinstance(target, ast.Name):
            yield target.id, node.value
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for name, value in zip(target.elts, node.value.elts):
                if isinstance(name, ast.Name):
                    yield name.id, value


def fold(op: ast.operator, left: int, right: int) -> object:
    """What two literals make together; None where that is not known."""
    if isinstance(op, ast.Add):
        return left + right
    if isinstance(op, ast.Sub):
        return left - right
    if isinstance(op, ast.Mult):
        return left * right
    if isinstance(op, ast.FloorDiv) and right:
        return left // right
    if isinstance(op, ast.LShift) and 0 <= right < 64:
        return left << right
    if isinstance(op, ast.Pow) and 0 <= right < 64:
        return left**right
    return None
