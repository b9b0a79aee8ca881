"""The block of docs/lint.md: every rule, with what it finds and what to do."""

from __future__ import annotations

from generate.blocks import table

from weft.verify.lint.rules import RULES


def rules() -> str:
    rows = [(f"`{one.name}`", one.severity, one.summary, one.remedy) for one in RULES.values()]
    return table(("rule", "severity", "finds", "remedy"), rows)
