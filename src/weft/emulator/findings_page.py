"""The page on what may be found, written from the table of kinds.

python -m weft.emulator.findings_page > docs/findings.md
"""

from __future__ import annotations

import sys

from weft.emulator.kinds import KINDS

INTRODUCTION = """\
# Findings

This page is generated from `src/weft/emulator/kinds.py`; do not edit it:
`python -m weft.emulator.findings_page > docs/findings.md`.

What `weft emulate` and `weft verify` report. A finding names both sides: rank, kernel, program,
source line, tensor, index. Its kind is one of these words, which do not change. Findings of the
check after compilation are in [its own page](post_compile_check.md), those of the lint in
[the lint's](lint.md). Programs with each of these faults, and programs that look as if they had
one, are in `tests/verify/wrong` and `tests/verify/right`."""


def page() -> str:
    """docs/findings.md."""
    parts = [INTRODUCTION]
    for kind in KINDS.values():
        raised = f"Raised as `{kind.error.__name__}`."
        if kind.example:
            raised += f" Example: `tests/verify/wrong/{kind.example}.py`."
        parts += [
            f"## {kind.name}", kind.means, f"*How it comes about.* {kind.how}",
            f"*Remedy.* {kind.remedy}", raised,
        ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
