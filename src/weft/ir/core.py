"""Core IR: a kernel is a template, the hooks fused into it, and the mappings that these need.

    program(ag_gemm_multiply)
    own = param(operand)
    gathered = param(operand)
    ...
    rows_ready = param(signals, by=engine, to=kernel, announces=(gathered,))
    rows = mapping(static, (gathered,))
    template(gemm, (128, 256, 64))
    hook(order, gather, (rows,))
    wait(ready, rows_ready, tile, rows, unless=own)
    hook(ready, rows_or_own, (gathered, own, rows))
    hook(emit, store, (c,))
    finish(done, slot)

The places where statements are fused in are the hooks of docs/decisions/009-hooks.md. Those at one
hook run in the order of the text: `hook` computes and moves data, `wait`,
`notify`, `credit`, `finish` and `advance` are all that has to do with signals; but for packets,
which say themselves that they have come, nothing else orders ranks.

This is the page that others import. The statements are in `core_statements.py`, and what is legal
in `core_rules.py`.
"""

from __future__ import annotations

from weft.ir import text
from weft.ir.core_rules import RULES
from weft.ir.core_statements import (
    ARRIVALS,
    DEPARTURES,
    ENGINE,
    FAR,
    FUNCTIONS,
    FUSED,
    HOOKS,
    KERNEL,
    MAPPINGS,
    OF_CHUNKS,
    OF_ROWS,
    ORDERS,
    SCOPES,
    SIGNALS,
    SORTS,
    TEMPLATES,
    TO,
    WORDS,
    Advance,
    Credit,
    Finish,
    Fused,
    Hook,
    Kernel,
    Mapping,
    Notify,
    Param,
    Statement,
    Template,
    Wait,
    homes,
    wrong_tile,
)
from weft.ir.legality import Violation, illegal, run

__all__ = [  # the statements and the rules are this page's too
    "ARRIVALS", "DEPARTURES", "ENGINE", "FAR", "FUNCTIONS", "HOOKS", "KERNEL", "MAPPINGS",
    "OF_CHUNKS", "OF_ROWS", "ORDERS", "RECORDS", "RULES", "SCOPES", "SIGNALS", "SORTS",
    "TEMPLATES", "TO", "WORDS", "FUSED", "Advance", "Credit", "Finish", "Hook", "Kernel",
    "Mapping", "Notify", "Param", "Statement", "Template", "Wait", "Fused", "check", "homes",
    "parse", "require", "show", "wrong_tile",
]  # fmt: skip

RECORDS = text.words(Param, Mapping, Template, *FUSED)


def show(kernel: Kernel, *, places: bool = True) -> str:
    """The kernel as text; `parse` takes it back."""
    header = text.Header(kernel.name, place=kernel.place)
    return text.show([header, *kernel.statements], places=places)


def parse(source: str) -> Kernel:
    """Raises  UsageError: with the line"""
    header, statements = text.read(source, RECORDS)
    return Kernel(header.title, statements, header.place)


def check(kernel: Kernel) -> list[Violation]:
    """Every breach of the rules."""
    return run(RULES, kernel, ("", "template", "signals", "ends"))


def require(kernel: Kernel) -> Kernel:
    """The kernel itself. Raises  IllegalError: with all breaches, and the user's lines"""
    if violations := check(kernel):
        raise illegal(f"Core IR of {kernel.name}", violations)
    return kernel
