"""The reference of the language, written from its declarations.

python -m weft.language.reference > docs/language.md
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

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

INTRODUCTION = """\
# The language

This page is generated from the declarations in `src/weft/language`; do not edit it:
`python -m weft.language.reference > docs/language.md`.

```python
import weft.language as wl
```

Kernels are plain `@triton.jit` functions (Gluon kernels may call everything that takes scalars, and
tiles with a layout). Each is handed `world.arg` as one argument, here called `world`, and every
primitive that reaches another rank takes it first. What follows the `*` in a signature is passed
by name. What memory guarantees what is said in [the memory model](memory_model.md).

Arguments are checked while the kernel is traced; the error carries the line of the kernel.
Where a line says "(emulator)", only `weft emulate` and `weft verify` can check it.
"""

FILES = (addressing, signals, one_sided, ordered, packets, barriers, clock)
# Plain @triton.jit, for every target.
DEVICE_FUNCTIONS = {
    slots: (slots.slot_epoch, slots.slot_wait_free, slots.slot_finish, slots.slot_close),
    tickets: (tickets.next_task,),
}


def reference() -> str:
    """The text of docs/language.md."""
    parts = [INTRODUCTION, _enums(), _coverage()]
    for module in FILES:
        parts.append(f"## {_title(module)}\n")
        file = module.__name__.rsplit(".", 1)[-1] + ".py"
        parts += [_primitive(p) for p in PRIMITIVES.values() if p.file == file and p.public]
    for module, functions in DEVICE_FUNCTIONS.items():
        parts.append(f"## {_title(module)}\n")
        parts += [_device_function(function) for function in functions]
    return "\n".join(parts)


def _title(module: Any) -> str:
    """The first line of a module's docstring, less its "Declarations:"."""
    line = (module.__doc__ or "").strip().splitlines()[0].removeprefix("Declarations: ")
    return line[0].upper() + line[1:].rstrip(".")


def _enums() -> str:
    rows = []
    for kind in (Order, Scope, SignalOp):
        members = ", ".join(f"`{member.name}`" for member in kind)
        sentence = (inspect.getdoc(kind) or "").splitlines()[0]
        rows.append(f"| `wl.{kind.__name__}` | {members} | {sentence} |")
    return "\n".join(["| enum | members | |", "|---|---|---|", *rows, ""])


def _coverage() -> str:
    """Which primitive exists where; reasons of gaps as notes below the table."""
    lines = ["## What exists where", "", f"| primitive | {' | '.join(BACKENDS)} |"]
    lines.append("|---" * (len(BACKENDS) + 1) + "|")
    notes: list[str] = []
    order = [module.__name__.rsplit(".", 1)[-1] + ".py" for module in FILES]
    table = coverage()
    for name in sorted(table, key=lambda name: order.index(PRIMITIVES[name].file)):
        row = table[name]
        cells = []
        for backend in BACKENDS:
            if row[backend]:
                notes.append(f"{len(notes) + 1}. `{name}` on {backend}: {row[backend]}.")
                cells.append(f"no ({len(notes)})")
            else:
                cells.append("yes")
        lines.append(f"| [`{name}`](#{name}) | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *notes, ""])


def _primitive(primitive: Primitive) -> str:
    return _entry(primitive.name, f"wl.{primitive.spelling}", primitive.doc)


def _device_function(function: Any) -> str:
    spelling = f"wl.{function.__name__}({', '.join(function.arg_names)})"
    return _entry(function.__name__, spelling, inspect.cleandoc(function.__doc__))


def _entry(name: str, spelling: str, doc: str) -> str:
    """Name, sentence, then signature and the rest as text that keeps its columns."""
    sentence, _, rest = doc.partition("\n\n")
    body = textwrap.dedent(rest).strip("\n")
    block = f"{spelling}\n\n{body}" if body else spelling
    return f"### {name}\n\n{' '.join(sentence.split())}\n\n```text\n{block}\n```\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
