"""A user's file, imported for what it defines."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from weft.base.errors import DtypeError, PlacementError, ShapeError, UsageError
from weft.ops import names

if TYPE_CHECKING:
    from weft.compiler import Compiled


def find_program(words: str) -> Compiled:
    """The program of `FILE.py:NAME`; the name may be left out where there is one.

    Raises  UsageError: no such file, or one that cannot be imported; no such program, with those
            that are there
    """
    from weft.compiler import Compiled

    file, _, name = words.partition(":")
    module = load_file(file)
    there = {key: value for key, value in vars(module).items() if isinstance(value, Compiled)}
    if not name and len(there) == 1:
        name = next(iter(there))
    if name not in there:
        known = ", ".join(there) or "none"
        missing = f"{file} has no program {name!r}" if name else f"{file}: name a program of it"
        raise UsageError(f"{missing}, as FILE.py:NAME; it has {known}")
    return there[name]


def load_file(file: str) -> ModuleType:
    """A user's file, imported for what it defines.

    Raises  UsageError: no such file, or one that cannot be imported
    """
    if not Path(file).is_file():
        known = "; an operator is no program: write one, FILE.py:NAME" if file in names() else ""
        raise UsageError(f"there is no file {file}{known}")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(file).parent))
    try:
        spec.loader.exec_module(module)
    except PlacementError:
        raise  # it names the line of the program, and what is missing there
    except Exception as error:
        lines = [one.lineno for one in traceback.extract_tb(error.__traceback__)
                 if Path(one.filename) == Path(file).resolve()]  # fmt: skip
        line = lines[-1] if lines else getattr(error, "lineno", None) or 1
        remedy = ""
        if not isinstance(error, (UsageError, ShapeError, DtypeError)):  # of what it defines
            remedy = (
                ". It is imported to find what it defines; put what is to run on ranks under"
                ' `if __name__ == "__main__":`'
            )
        kind = type(error).__name__
        raise UsageError(
            f"{file}:{line}: importing the file ends with {kind}: {error}{remedy}"
        ) from error
    finally:
        sys.path.pop(0)
    return module
