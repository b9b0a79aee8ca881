"""Which world's call a kernel is compiled for: counted there, or refused.

A thread makes calls of one world after the other, and what it compiles is for the last of them;
what other threads compile is for the last call of this process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from weft.base.errors import NotPreparedError

_SIZE = re.compile(r"\b(\w+)=(\d+)\b")


# A world and what it calls.
_Call = tuple[ref[Any], str]


class _OfThread(threading.local):
    call: _Call | None = None
    is_preparing = False


_here = _OfThread()
_last: list[_Call | None] = [None]


def begin_call(world: ref[Any], name: str) -> None:
    """What this thread compiles from here on is for this call."""
    _here.call = _last[0] = (world, name)


@contextmanager
def preparing() -> Iterator[None]:
    """What this thread compiles meanwhile is for no call."""
    _here.is_preparing = True
    try:
        yield
    finally:
        _here.is_preparing = False


def compiles(kernel: str) -> None:
    """A launch is about to compile this kernel.

    Raises  NotPreparedError: the world lets nothing be compiled any more
    """
    call = _here.call or _last[0]
    world = None if call is None else call[0]()
    if call is None or world is None or _here.is_preparing:
        return
    if world.settings.strict:
        raise NotPreparedError(_not_prepared(world, call[1], kernel))
    world.compiled += 1


def _not_prepared(world: Any, name: str, kernel: str) -> str:
    name = name.partition(" Config(")[0]
    op, _, rest = name.partition(" ")
    if op == "program":
        op, _, rest = rest.partition(" ")
    sizes = dict(_SIZE.findall(rest))
    wanted = ", ".join(f'"{size}": {extent}' for size, extent in sizes.items())
    shape = ",".join(f"{size}={extent}" for size, extent in sizes.items())
    return (
        f"{name} on rank {world.rank} of {world.num_ranks} would compile {kernel} for "
        f"{world.target}, but weft.init(strict=True) lets no call compile: have it compiled before,"
        f" by weft.prepare({op}, {{{wanted}}}, world=world) once the world is there, or by `weft "
        f"prepare {op} --shape {shape} --ranks {world.num_ranks} --target {world.target}`; name a "
        "range of m to serve all of it"
    )
