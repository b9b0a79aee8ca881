"""A peer's kernels, measured beside ours from a local folder that is no part of the project.

The folder holds files `NAME.py`, each with `variants(op)`: a mapping from a variant's name to a
function of a Case that returns a Variant, as baselines on a card are; {} for operators that the
peer has not. The folder is on the import path meanwhile, so a checkout of the peer may lie there.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.base.errors import UsageError


def peers_of(op: str, folder: str | Path | None) -> dict[str, Callable[[Any], Any]]:
    """Every peer's variants of `op`, by name.

    Raises  UsageError: no such folder, nothing in it, or a file that is no peer's
    """
    if not folder:
        return {}
    place = Path(folder).resolve()
    files = sorted(place.glob("*.py"))
    if not files:
        raise UsageError(f"--peers {folder}: no such folder, or no NAME.py with variants(op) in it")
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    found: dict[str, Callable[[Any], Any]] = {}
    for file in files:
        spec = importlib.util.spec_from_file_location(f"weft_peer_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, "variants"):
            raise UsageError(f"--peers: {file} has no variants(op)")
        found.update(module.variants(op))
    return found
