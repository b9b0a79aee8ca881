"""The table of TTIR operations that the emulator knows: how each is written as Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Emit = Callable[[Any, Any], None]

# By name: `emit(code, op)` writes the operation with a code writer.
OPERATIONS: dict[str, Emit] = {}


def operation(*names: str) -> Callable[[Emit], Emit]:
    """Enter the decorated emitter as the meaning of these operations."""

    def enter(emit: Emit) -> Emit:
        for name in names:
            if name in OPERATIONS:
                raise ValueError(f"{name} stands twice in the emulator's table of operations")
            OPERATIONS[name] = emit
        return emit

    return enter


def templates(rows: dict[str, str]) -> None:
    """Enter operations that are written element by element, each from its template."""
    for name, template in rows.items():
        operation(name)(partial(_write_template, template=template))


def _write_template(code: Any, op: Any, template: str) -> None:
    code.elementwise(op, template)
