"""Each program of right/ looks suspicious and is not: silent under every schedule."""

from __future__ import annotations

import pytest
from programs import load, programs, run

RIGHT = programs("right")
SCHEDULES = 8


def test_there_are_enough():
    assert len(RIGHT) >= 28


@pytest.mark.few(15)
@pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
def test_silent(path):
    program, known = load(path), {}
    for seed in range(SCHEDULES):
        outcome = run(program, seed, known)
        if outcome.errors:
            raise outcome.errors[0]
        assert outcome.report.ok, f"seed {seed}: {outcome.report}"
