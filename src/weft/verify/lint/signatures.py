"""The parameters of the language's functions by name, read from their source.

Read, not imported: importing the language imports Triton, which takes longer than to lint a file.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

LANGUAGE = Path(__file__).resolve().parents[2] / "language"
# Files whose functions are for kernels; what else the language exports serves the host.
_NOT_PUBLIC = {"registry", "arguments", "reference", "wait_report", "world_layout"}


@cache
def signatures() -> dict[str, tuple[str, ...]]:
    """Every function of weft.language that a kernel may call; those by name only are left out."""
    tree = ast.parse((LANGUAGE / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    exported = {alias.asname or alias.name for node in imports for alias in node.names}
    found = {}
    for path in sorted(LANGUAGE.glob("*.py")):
        if path.stem in _NOT_PUBLIC or path.stem.startswith("_"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name in exported:
                positional = [*node.args.posonlyargs, *node.args.args]
                found[node.name] = tuple(arg.arg for arg in positional)
    return found
