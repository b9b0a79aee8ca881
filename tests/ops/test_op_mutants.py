"""Every mutant of every operator, by every transport, on one node and on two."""

from __future__ import annotations

from typing import Any

import pytest

from weft.base.target import TARGETS
from weft.ops import cards
from weft.tools.check import Work
from weft.tools.mutants import mutants_in_trials
from weft.verify.mutants import Bounds

EMU = TARGETS["emu"]
# What a laptop runs; the rest is for those who have minutes.
QUICK = [("reduce_scatter", "sm_push")]
# Transports with more signals than this come by all of them.
FEWEST = 8


def cases() -> list[Any]:
    found = []
    for name, op in cards().items():
        # On one node, then what there is on several.
        works = [Work(op, sum(one.nodes), one.shape, "float32", one.nodes) for one in op.trials]
        transports = (config.transport for work in works
                      for config in op.candidates(work.problem(), EMU))  # fmt: skip
        for transport in dict.fromkeys(transports):  # several differ in their tiles alone
            case = (name, transport)
            if transport in op.composed:
                continue
            marks = () if case in QUICK else pytest.mark.slow
            found.append(pytest.param(*case, id="-".join(case), marks=marks))
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "transport"), cases())
def test_every_signal_is_needed(name, transport):
    bounds = Bounds(schedules=16, argued=2, jobs=1)
    report = mutants_in_trials(cards()[name], bounds, transport=transport)
    print(report)
    assert report.ok and not report.unreached, str(report)
    assert len(report.verdicts) >= FEWEST
