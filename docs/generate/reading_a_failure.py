"""Blocks of docs/reading_a_failure.md: failures as they are printed, of tests/verify/wrong."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from generate.blocks import DOCS, code

TESTS = DOCS.parent / "tests" / "verify"
sys.path.insert(0, str(TESTS))

from programs import load, run  # noqa: E402

from weft.base.report import Finding  # noqa: E402
from weft.emulator.observation import Recorder  # noqa: E402
from weft.verify.picture import draw  # noqa: E402
from weft.verify.picture.terminal import render  # noqa: E402

SCHEDULES = 8

# By kind of finding the program that docs/findings.md names for it.
EXAMPLES = dict(
    re.findall(
        r"^## ([^\n]*)\n(?:(?!^## ).*\n)*?.*Example: `(.*)`",
        (DOCS / "findings.md").read_text(),
        re.M,
    )
)


def race() -> str:
    return shown("race")


def deadlock() -> str:
    return shown("deadlock")


def unsatisfiable_wait() -> str:
    return shown("unsatisfiable wait")


def lost_signal() -> str:
    return shown("lost signal")


def shown(name: str) -> str:
    """The example of one kind of finding: its code, its report, its picture."""
    path = DOCS.parent / EXAMPLES[name]
    seed, finding, recorder = seen(name)
    picture = render(draw(recorder.events, finding, dropped=recorder.dropped)).plain
    story, text = _parts(path)
    return "\n\n".join(
        [
            f"{story} (`{path.relative_to(DOCS.parent)}`)",
            code(text),
            f"Under seed {seed}:",
            f"```text\n{_for_readers(str(finding))}\n\n{_for_readers(picture)}\n```",
        ]
    )


def seen(name: str) -> tuple[int, Finding, Recorder]:
    """The first seed under which the kind's example shows it, and what was seen."""
    path = DOCS.parent / EXAMPLES[name]
    program, known = load(path), {}
    for seed in range(SCHEDULES):
        recorder = Recorder()
        report = run(program, seed, known, observers=[recorder]).report
        for finding in report:
            if finding.kind == name:
                return seed, finding, recorder
    raise AssertionError(f"{path.name} shows no {name} within {SCHEDULES} schedules")


def lasting(text: str) -> str:
    """The text without what a change elsewhere moves: counts of steps, lines of shared files."""
    text = re.sub(r"\b(pieces|programs)\.py:\d+", r"\1.py:N", text)
    text = re.sub(r"\b(step|steps) \d+|\d+ of \d+ steps", "step N", text)
    return re.sub(r"^ {2,}\d+  ", "N ", text, flags=re.M)


def _parts(path: Path) -> tuple[str, str]:
    """The first paragraph of a program's docstring, and its code behind imports and settings."""
    text = path.read_text()
    tree = ast.parse(text)
    story = (ast.get_docstring(tree) or "").split("\n\n")[0]
    first = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    start = min([first.lineno, *(decorator.lineno for decorator in first.decorator_list)])
    return " ".join(story.split()), "\n".join(text.splitlines()[start - 1 :])


def _for_readers(text: str) -> str:
    """As a reader in the repository's folder sees it, without the chains into weft."""
    lines = text.replace(f"{DOCS.parent}/", "").splitlines()
    return "\n".join(line for line in lines if not re.match(r"\s+via src/weft/", line))
