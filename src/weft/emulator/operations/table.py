"""The table of TTIR operations that the emulator knows, one row per operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Operation:
    """How one operation becomes Python: `emit(code, op)` writes it with a code writer."""

    name: str
    summary: str
    emit: Callable[[Any, Any], None]


OPERATIONS: dict[str, Operation] = {}


def operation(name: str, summary: str) -> Callable:
    """Enter the decorated emitter as the meaning of `name`."""

    def enter(emit: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        add(name, summary, emit)
        return emit

    return enter


def add(name: str, summary: str, emit: str | Callable[[Any, Any], None]) -> None:
    """Enter a meaning: how it is written, or the template of an operation element by element."""
    if name in OPERATIONS:
        raise ValueError(f"{name} stands twice in the emulator's table of operations")
    if isinstance(emit, str):
        OPERATIONS[name] = Operation(name, summary, partial(_write_template, template=emit))
    else:
        OPERATIONS[name] = Operation(name, summary, emit)


def _write_template(code: Any, op: Any, template: str) -> None:
    code.elementwise(op, template)
