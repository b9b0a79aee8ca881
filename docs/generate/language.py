"""Blocks of docs/language.md: the reference of the language, from its declarations."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

from generate.blocks import code, table

from weft.base.vocabulary import Order, Scope, SignalOp
from weft.language import (
    addressing,
    barriers,
    clock,
    one_sided,
    ordered,
    packets,
    signals,
    slots,
    tickets,
)
from weft.language.registry import BACKENDS, PRIMITIVES, Primitive, coverage

FILES = (addressing, signals, one_sided, ordered, packets, barriers, clock)
# Plain @triton.jit, for every target.
DEVICE_FUNCTIONS = {
    slots: (slots.slot_epoch, slots.slot_wait_free, slots.slot_finish, slots.slot_close),
    tickets: (tickets.next_task,),
}


def enums() -> str:
    rows = []
    for kind in (Order, Scope, SignalOp):
        members = ", ".join(f"`{member.name}`" for member in kind)
        meaning, *_ = (inspect.getdoc(kind) or "").splitlines()
        rows.append((f"`wl.{kind.__name__}`", members, meaning))
    return table(("enum", "members", "meaning"), rows)


def gaps() -> str:
    """Which primitive is missing where, and why."""
    found = coverage()
    rows = [
        (f"[`{name}`](#{name})", backend, found[name][backend])
        for name in found
        for backend in BACKENDS
        if found[name][backend]
    ]
    return table(("primitive", "is missing on", "why"), rows)


def primitives() -> str:
    parts = []
    for module in FILES:
        parts.append(f"## {_title(module)}")
        file = module.__name__.rsplit(".", 1)[-1] + ".py"
        parts += [_primitive(one) for one in PRIMITIVES.values() if one.file == file and one.public]
    for module, functions in DEVICE_FUNCTIONS.items():
        parts.append(f"## {_title(module)}")
        parts += map(_device_function, functions)
    return "\n\n".join(parts)


def _title(module: Any) -> str:
    """The first line of a module's docstring, less its "Declarations:"."""
    line = (module.__doc__ or "").strip().splitlines()[0].removeprefix("Declarations: ")
    return line[0].upper() + line[1:].rstrip(".")


def _primitive(primitive: Primitive) -> str:
    return _entry(primitive.name, f"wl.{primitive.spelling}", primitive.doc)


def _device_function(function: Any) -> str:
    spelling = f"wl.{function.__name__}({', '.join(function.arg_names)})"
    return _entry(function.__name__, spelling, inspect.cleandoc(function.__doc__))


def _entry(name: str, spelling: str, doc: str) -> str:
    """Name, sentence, then signature and the rest as text that keeps its columns."""
    sentence, _, rest = doc.partition("\n\n")
    body = textwrap.dedent(rest).strip("\n")
    text = f"{spelling}\n\n{body}" if body else spelling
    return f"### {name}\n\n{' '.join(sentence.split())}\n\n{code(text, 'text')}"
