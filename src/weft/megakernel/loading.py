"""Generated source as a module: a file in the cache, named by what it holds, then imported.

Triton reads a kernel's text from its file, and reports name its lines; so there is one. It is
written beside its place and moved there: several ranks may do so at once. What runs is the text
that was asked for, and never what lies on disk: neither an edited file nor bytecode beside it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType

from weft.base.errors import UsageError
from weft.base.settings import Settings

_lock = threading.Lock()  # of emulated ranks, which are threads


def import_text(name: str, text: str) -> ModuleType:
    """The module of a text; imported once in a process.

    Raises  UsageError: the cache's folder cannot be written
    """
    title = f"weft_generated_{_named(name, text)}"
    with _lock:
        if (module := sys.modules.get(title)) is None:
            path = str(write(name, text))
            spec = importlib.util.spec_from_file_location(title, path)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            # Triton asks for the lines; without a time of change they are not read again.
            linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
            exec(compile(text, path, "exec", dont_inherit=True), vars(module))
            sys.modules[title] = module
    return module


def _named(name: str, text: str) -> str:
    return f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def folder() -> Path:
    """Where generated source lies."""
    given = Settings.from_environment().cache_dir
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given or Path(home) / "weft") / "generated"


def write(name: str, text: str) -> Path:
    """The text's file. Somebody may have edited it: what is not the text is written again."""
    path = folder() / f"{_named(name, text)}.py"
    try:
        if not path.exists() or path.read_text() != text:
            _replace(path, text)
    except OSError as error:
        raise UsageError(
            f"the generated kernel {name} cannot be kept in {path.parent}: {error.strerror}; set "
            "WEFT_CACHE_DIR to a folder that can be written"
        ) from error
    return path


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
        part.write(text)
    os.replace(part.name, path)
