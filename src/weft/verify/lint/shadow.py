"""A file's device functions without its host code, so that Triton can lower them unrun.

The shadow of a file holds, on the same lines, what kernels are made of: imports of Triton and weft,
constants, named tuples and `@triton.jit` functions. Everything else is left out, and so nothing of
what a script does is done.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

from weft.verify.lint.source import Source, read

IMPORTED = {"triton", "weft", "math", "typing", "collections", "enum", "functools", "__future__"}


class Unshadowed(Exception):
    """A file whose device functions cannot stand alone; the text says why."""


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="weft_lint_")  # gone when Python ends


def shadow(source: Source, depth: int = 0) -> ModuleType:
    """The module of `source`'s device functions.

    Raises  Unshadowed: they need something that is not among constants and device functions
    """
    # By its text: Triton keeps what it has lowered, with the name of the file in it.
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:12]
    path = Path(_folder().name) / f"{Path(source.path).stem}_{digest}.py"
    path.write_text(shadow_text(source))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _borrow(source, module, depth)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file's own constants raise
        raise Unshadowed(f"{type(error).__name__}: {error}") from error
    return module


def shadow_text(source: Source) -> str:
    """The text that is kept, on its own lines."""
    kept: dict[int, str] = {}
    for node in source.tree.body:
        first, last = _lines(source, node)
        for number in range(first, last + 1):
            kept[number] = source.line(number)
        if isinstance(node, ast.Import) and (imports := _imports(node)):
            before = kept.get(node.lineno)
            kept[node.lineno] = f"{before}; {imports}" if before else imports
        if isinstance(node, ast.FunctionDef) and first:
            for decorator in node.decorator_list:
                # Autotune and the like, and what jit is given, are about launches.
                is_jit = "jit" in ast.unparse(decorator)
                if not is_jit or isinstance(decorator, ast.Call):
                    for number in range(decorator.lineno, (decorator.end_lineno or 0) + 1):
                        kept[number] = ""
                    if is_jit:
                        name = ast.unparse(getattr(decorator, "func", decorator))
                        kept[decorator.lineno] = f"@{name}"
    return "\n".join(kept.get(number, "") for number in range(1, len(source.lines) + 1)) + "\n"


def _imports(node: ast.Import) -> str:
    """`import torch, triton` without what is not for kernels; "" if nothing is left."""
    names = [alias for alias in node.names if alias.name.split(".")[0] in IMPORTED]
    return ast.unparse(ast.Import(names)) if names else ""


def _lines(source: Source, node: ast.stmt) -> tuple[int, int]:
    """The lines of a statement that is kept as it is; (0, -1) for others."""
    keep = False
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        keep = not node.level and module.split(".")[0] in IMPORTED
    elif isinstance(node, ast.ClassDef):
        keep = node.name in source.records
    elif isinstance(node, ast.FunctionDef):
        device = source.devices.get(node.name)
        keep = device is not None and device.node is node
    elif isinstance(node, ast.Assign):
        keep = source.constant(node.value, source.constants) is not None
    elif isinstance(node, ast.AnnAssign):
        keep = node.value is not None and source.constant(node.value, source.constants) is not None
    if not keep:
        return 0, -1
    decorators = [one.lineno for one in getattr(node, "decorator_list", ())]
    return min([node.lineno, *decorators]), node.end_lineno or node.lineno


def _borrow(source: Source, module: ModuleType, depth: int) -> None:
    """Names that the file takes from files beside it, from their shadows."""
    for node in source.tree.body:
        if not isinstance(node, ast.ImportFrom) or depth > 3:
            continue
        if not node.level and (node.module or "").split(".")[0] in IMPORTED:
            continue
        for alias in node.names:
            name = alias.asname or alias.name
            found = _taken(source, source.imports[name], depth)
            if found is not None:
                setattr(module, name, found)


def _taken(source: Source, spelling: str, depth: int) -> object | None:
    """What an import gives: a module's shadow, or something of one."""
    path = source.file_of(spelling)
    if path is not None and (whole := read(path)) is not None:
        return shadow(whole, depth + 1)
    found = source.elsewhere(spelling)
    return getattr(shadow(found[0], depth + 1), found[1], None) if found else None
