"""Worlds by name: custom operators take strings, so a world can be found by its name.

A world enters itself; of what is entered this page asks the name alone.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

from weft.base.errors import UsageError

_worlds: dict[tuple[Hashable, str], Any] = {}
_lock = threading.Lock()


def find(scope: Hashable, name: str) -> Any:
    """The open world called `name`.

    Raises  UsageError: none is; the message lists those that are
    """
    with _lock:
        world = _worlds.get((scope, name))
        known = sorted(other for owner, other in _worlds if owner == scope)
    if world is None:
        there = f"open are: {', '.join(known)}" if known else "none is open; call weft.init() first"
        raise UsageError(f"no world is called {name!r}; {there}")
    return world


def all_of(scope: Hashable) -> list[Any]:
    """The open worlds of a scope."""
    with _lock:
        return [world for (owner, _), world in _worlds.items() if owner == scope]


def add(scope: Hashable, world: Any) -> None:
    with _lock:
        _worlds[scope, world.name] = world


def remove(scope: Hashable, world: Any) -> None:
    with _lock:
        if _worlds.get((scope, world.name)) is world:
            del _worlds[scope, world.name]


def forget(scope: Hashable) -> None:
    """Drop all worlds of a scope that is gone, open or not."""
    with _lock:
        for key in [key for key in _worlds if key[0] == scope]:
            del _worlds[key]


def free_name(scope: Hashable, wanted: str) -> str:
    """`wanted`, or `wanted.2`, `wanted.3` ... where that is taken."""
    with _lock:
        name, count = wanted, 1
        while (scope, name) in _worlds:
            count += 1
            name = f"{wanted}.{count}"
    return name
