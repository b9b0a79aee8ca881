"""Writes the page that shows one failure of each kind, from the programs of tests/verify/wrong.

python tests/verify/picture/reading.py > docs/reading_a_failure.md
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "verify"))

from programs import load, run  # noqa: E402

from weft.base.report import Finding  # noqa: E402
from weft.emulator.kinds import KINDS, Kind  # noqa: E402
from weft.emulator.observation import Recorder  # noqa: E402
from weft.verify.picture import draw  # noqa: E402
from weft.verify.picture.terminal import render  # noqa: E402

SCHEDULES = 8


INTRODUCTION = """\
# Reading a failure

This page is generated from programs that are wrong on purpose; do not edit it:
`python tests/verify/picture/reading.py > docs/reading_a_failure.md`.

When `weft emulate` or `weft verify` finds something, it says what, with both sides and what to do
about it, and draws how it came about: a *space-time picture* of the part of the run that decides.
`--html FILE` writes the same as a page for a browser, with more of the past, where hovering over a
step shows its line and a click keeps what led to it. One seed is one schedule, so the picture does
not change from run to run.

## The picture

Each party (a program of a kernel, a copy engine, a host) has a letter and a column; time runs down,
one step a row. At the right is what the party did, and the line at which it did so.

| | |
|---|---|
| `●` | a signal: a word changes |
| `○` | a wait that passes; `◌` one that begins and has no end here |
| `✗` | a wait that is stuck: what it waits for, what it sees |
| `◆` | what the finding is about: both accesses of a race, the signal that is lost |
| `┬` `┴` | the party begins, ends |
| `●─╮ ╰▶○` | the wait *acquires* the signal: what came before that is known behind the wait |
| `●┈╮ ╰▶○` | the wait sees it, but it orders nothing: relaxed, of too small a scope, a packet |
| `◆╌╮ ╰▶◆` | the order that is missing: a chain of signals and waits should lead along here |

Read it from below. Above the last row is what its party had done and acquired before; follow the
arrows back to see how far it knows of the others. Of a race the last lines say so in words. Steps
count everything that happened in the run, and only the nearest are drawn. At *elsewhere* is what
the parties without a column were about at the end.

Below are programs with one fault each. What they share (`send`, `take`, `launch_once`) is in
`tests/verify/pieces.py`; chains of calls into weft are left out of the reports here. All kinds of
findings are in [Findings](findings.md).
"""


def page() -> str:
    """The text of docs/reading_a_failure.md."""
    return "\n".join([INTRODUCTION, *map(section, examples())])


def examples() -> list[Kind]:
    """The kinds that have a program of their own."""
    return [kind for kind in KINDS.values() if kind.example]


def section(kind: Kind) -> str:
    path = ROOT / "tests" / "verify" / "wrong" / f"{kind.example}.py"
    seed, finding, recorder = _first(path, kind.name)
    picture = render(draw(recorder.events, finding, dropped=recorder.dropped)).plain
    story, code = _parts(path)
    return "\n".join(
        [
            f"## {kind.name[0].upper()}{kind.name[1:]}\n",
            f"{story} (`{path.relative_to(ROOT)}`)\n",
            f"```python\n{code}\n```\n",
            f"Under seed {seed}:\n",
            f"```text\n{_shown(str(finding))}\n\n{_shown(picture)}\n```\n",
        ]
    )


def _first(path: Path, kind: str) -> tuple[int, Finding, Recorder]:
    """The first seed under which the program shows this kind, and what was seen."""
    program, known = load(path), {}
    for seed in range(SCHEDULES):
        recorder = Recorder()
        report = run(program, seed, known, observers=[recorder]).report
        for finding in report:
            if finding.kind == kind:
                return seed, finding, recorder
    raise AssertionError(f"{path.name} shows no {kind} within {SCHEDULES} schedules")


def _parts(path: Path) -> tuple[str, str]:
    """The first paragraph of a program's docstring, and its code behind imports and settings."""
    text = path.read_text()
    tree = ast.parse(text)
    story = (ast.get_docstring(tree) or "").split("\n\n")[0]
    first = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    start = min([first.lineno, *(decorator.lineno for decorator in first.decorator_list)])
    return " ".join(story.split()), "\n".join(text.splitlines()[start - 1 :]).rstrip()


def _shown(text: str) -> str:
    """As a reader in the repository's folder sees it, without the chains into weft."""
    lines = text.replace(f"{ROOT}/", "").splitlines()
    return "\n".join(line for line in lines if not re.match(r"\s+via src/weft/", line))


if __name__ == "__main__":
    sys.stdout.write(page())
