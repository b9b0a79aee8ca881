"""Blocks of docs/composed_kernels.md: one launch of docs/compiler.md's program, to the call."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

from generate import compiler
from generate.blocks import code, table

from weft.base.place import Frame, Place
from weft.compiler.lower import kernels, source
from weft.ir import core, core_in_plan, core_rules, device
from weft.ir.device import Launch

# It waits, keeps tiles, announces and gives the slot back.
KERNEL = "mlp_multiply_2"


def launch() -> str:
    shown = [one for one in compiler.called().plan.of(Launch) if one.kernel == KERNEL]
    return code(device.text.show(shown, places=False))


@functools.cache
def _kernel() -> core.Kernel:
    """As if the program were a user's, in mlp.py."""
    kernel = kernels.lower(compiler.called().plan)[KERNEL]
    here = Place((Frame("mlp.py", 8, "mlp"),))
    statements = tuple(replace(one, place=here) for one in kernel.statements)
    return replace(kernel, statements=statements)


def core_ir() -> str:
    return code(core.show(_kernel(), places=False))


def places() -> str:
    rows = []
    for slot, may in core.HOOKS.items():
        functions = [name for name in core.FUNCTIONS if slot in core.homes(name)]
        rows.append((f"`{slot}`", _words(may), _words(functions)))
    return table(("place", "what may order ranks there", "what `hook` can name"), rows)


def _words(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words) or "-"


def rules() -> str:
    return table(("Core rule", "why"), [(rule.name, rule.why) for rule in core_rules.RULES])


def rules_in_plan() -> str:
    rows = [(rule.name, rule.why) for rule in core_in_plan.RULES]
    return table(("rule of a kernel in its plan", "why"), rows)


def composition() -> str:
    return code(source.shown(_kernel()), "text")
