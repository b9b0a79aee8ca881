"""The language's functions by name, read from their source: their parameters.

Read, not imported: importing the language imports Triton, which takes longer than to lint a file.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LANGUAGE = Path(__file__).resolve().parents[2] / "language"
# Files whose functions are for kernels; what else the language exports serves the host.
_NOT_PUBLIC = {"registry", "arguments", "reference", "wait_report", "world_layout"}


@dataclass(frozen=True)
class Signature:
    name: str
    parameters: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: frozenset[str]

    def bind(self, node: ast.Call) -> dict[str, ast.expr]:
        """The arguments by parameter; starred ones end what can be said of positions."""
        bound: dict[str, ast.expr] = {}
        for name, argument in zip(self.parameters, node.args):
            if isinstance(argument, ast.Starred):
                break
            bound[name] = argument
        bound.update({word.arg: word.value for word in node.keywords if word.arg})
        return bound

    def complaint(self, node: ast.Call) -> str:
        """What a Python that knew the declaration would say; empty where the call fits."""
        if any(isinstance(a, ast.Starred) for a in node.args) or any(
            word.arg is None for word in node.keywords
        ):
            return ""
        if len(node.args) > len(self.parameters):
            named = f"; {', '.join(self.keyword_only)} go by name" if self.keyword_only else ""
            count = len(self.parameters)
            return f"takes {count} arguments by position, not {len(node.args)}{named}"
        bound = self.bind(node)
        known = {*self.parameters, *self.keyword_only}
        if unknown := [name for name in bound if name not in known]:
            return f"has no parameter {unknown[0]!r}; it has {', '.join(sorted(known))}"
        if missing := sorted(self.required - set(bound)):
            return f"needs {', '.join(f'{name}=' for name in missing)}"
        return ""


@cache
def signatures() -> dict[str, Signature]:
    """Every function of weft.language that a kernel may call."""
    found = {}
    for path in sorted(LANGUAGE.glob("*.py")):
        if path.stem in _NOT_PUBLIC or path.stem.startswith("_"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                found[node.name] = _signature(node)
    return {name: signature for name, signature in found.items() if name in exported()}


@cache
def exported() -> frozenset[str]:
    """Every name of `weft.language`."""
    tree = ast.parse((LANGUAGE / "__init__.py").read_text())
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return frozenset(names | {path.stem for path in LANGUAGE.iterdir() if path.stem[0] != "_"})


def _signature(node: ast.FunctionDef) -> Signature:
    args = node.args
    positional = tuple(arg.arg for arg in (*args.posonlyargs, *args.args))
    keyword_only = tuple(arg.arg for arg in args.kwonlyargs)
    required = set(positional[: len(positional) - len(args.defaults)])
    required |= {name for name, default in zip(keyword_only, args.kw_defaults) if default is None}
    return Signature(node.name, positional, keyword_only, frozenset(required))
