"""`docs/lint.md`, from the rules: `python -m weft.verify.lint.page > docs/lint.md`."""

from __future__ import annotations

import sys

from weft.verify.lint.linter import lint_text
from weft.verify.lint.registry import RULES, Rule
from weft.verify.lint.rules import load_rules

HEAD = """# Lint

    weft lint FILE.py ..        files and folders; --json, --rules, --source-only

reads kernels and the host code that launches them, and says what is wrong without running anything.
Exit code 0: nothing was found, 1: something was, 2: the command was misused. A finding has a place,
the line with carets, the reason and the remedy.

It follows calls of device functions, also into files beside the one that is read and into weft's
own, and hooks that are handed to templates; it knows what a launch passes to a kernel. What it does
not know it says nothing about: a rule speaks where the mistake is in sight, so a clean file is not
a proof. That is what `weft verify` is for.

Kernels that synchronise are also lowered to TTIR, as far as that goes without a launch: there loop
options, scopes and branches that a constexpr decides are decided. For this the file's imports of
Triton and weft, its constants, named tuples and device functions are taken, and nothing else of it.
A parameter is what a launch in the file passes, else what its use says: a pointer where it is
loaded from or stored to, to a word where it is waited for, to float32 where nothing says more; a
constexpr that no launch passes is guessed. A kernel that cannot be lowered is a note on stderr, no
finding. `--source-only` leaves this part out, and with it the seconds that Triton takes to start.

Limits: a loop's body is read once, so what one turn does to the next is not seen; both sides of a
branch are taken to be possible unless a constant decides; waits and signals in inline assembly are
not understood; a host's epoch numbers are judged in recordings only, since eager they are right; a
parameter called `rank` or `world_size` is taken for what it says.

## Exceptions

A comment at the end of the line, or on a line above it, allows one rule there, with a reason:

```python
# weft: allow volatile-wait: this measures what a volatile wait costs
while tl.load(word, volatile=True) < 1:
```

An allowance without a reason is a finding (`allow-without-reason`), one that silences nothing too
(`unused-allow`). A file that is no Python is one (`syntax-error`).

## Rules

Each with a kernel that it speaks about, and the same kernel put right. The page is generated
(`python -m weft.verify.lint.page > docs/lint.md`), and a test holds it to the rules.

"""


def page() -> str:
    """The whole page."""
    load_rules()
    rows = [f"| [{r.name}](#{r.name}) | {r.severity} | {r.summary} |" for r in RULES.values()]
    table = "\n".join(["| rule | | finds |", "|---|---|---|", *rows])
    return HEAD + table + "\n\n" + "\n".join(_section(rule) for rule in RULES.values())


def _section(rule: Rule) -> str:
    said = lint_text(rule.bad, "kernels.py").problems[0]
    return (
        f"### {rule.name}\n\n{rule.summary}\n\n```python\n{rule.bad}```\n\n"
        f"> {said.message}.\n\nRemedy: {rule.remedy}.\n\n```python\n{rule.good}```\n"
    )


if __name__ == "__main__":
    sys.stdout.write(page())
