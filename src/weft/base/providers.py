"""Modules of higher rooms that lower ones call: asked for by a word, imported when first needed.

    provide(collectives="weft.ops")              the root says where each is
    provider("collectives").all_gather(x, world=world)

Imports go down only. What a compiled program is run by stands above the compiler, and what it calls
of operators above what runs it: both are found here.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

_MODULES: dict[str, str] = {}


def provide(**modules: str) -> None:
    """Say which module answers to a word; nothing is imported yet."""
    _MODULES.update(modules)


@cache
def provider(word: str) -> ModuleType:
    """The module that answers to `word`."""
    return import_module(_MODULES[word])
