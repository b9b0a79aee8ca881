"""Each program of wrong/ is found: the right kind, the marked line, within few schedules."""

from __future__ import annotations

import pytest
from programs import load, marked_line, names, programs, raised_at, run

WRONG = programs("wrong")
SCHEDULES = 4


def test_there_are_enough():
    assert len(WRONG) >= 28


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_found(path):
    program, line = load(path), marked_line(path)
    seen, known = [], {}
    for seed in range(SCHEDULES):
        outcome = run(program, seed, known)
        seen += [*outcome.report, *outcome.errors]
        if expected := getattr(program, "RAISES", ""):
            errors = [error for error in outcome.errors if type(error).__name__ == expected]
            hit = any(raised_at(error, path, line) for error in errors)
        else:
            says = getattr(program, "SAYS", "")
            found = [f for f in outcome.report if f.kind == program.FOUND and says in str(f)]
            hit = not outcome.errors and any(names(finding, path, line) for finding in found)
        if hit:
            return
    pytest.fail(f"line {line} was not named; what was seen:\n" + "\n".join(map(str, seen)))
