"""Every mutant of every example: what a newcomer copies has no signal too many, nor too few."""

from __future__ import annotations

from pathlib import Path

import pytest
from mending import BUG, ROOT, mended

from weft.base.topology import Topology
from weft.tools.mutants import mutants_of_script
from weft.verify.mutants import Bounds

NODES = {"10_two_nodes.py": (2, 2)}
QUICK = "03_signal.py"
# Programs' kernels are tried one by one (tests/compiler/test_core_mutants.py). Of the first each
# signal was found to be needed but credits: what its second product waits for says that all ranks
# have read what the same plan left before. Credits are for calls of other plans on the same slot.
# So are those of one kernel, and its tables' (tests/megakernel/test_scoreboard_mutants.py).
COMPILED = ("13_program.py", "16_megakernel.py", "17_experts.py")
# Call operators alone, whose signals are tried with them.
CALLS = ("15_training.py", "18_train_model.py", "19_pipeline.py", "20_long_sequence.py")


def cases():
    for path in sorted((ROOT / "examples").glob("[0-9]*.py")):
        if path.name not in (BUG, *COMPILED, *CALLS):
            marks = () if path.name == QUICK else pytest.mark.slow
            yield pytest.param(path, id=path.name, marks=marks)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", list(cases()))
def test_every_signal_is_needed(path: Path):
    nodes = NODES.get(path.name, (4,))
    report = mutants_of_script(str(path), [], Topology.of(nodes=nodes), Bounds(schedules=6, jobs=1))
    print(report)
    assert report.ok, str(report)
    assert len(report.verdicts) >= 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorials_answer_has_no_signal_too_many(tmp_path: Path):
    report = mutants_of_script(
        str(mended(tmp_path)), [], Topology.of(4), Bounds(schedules=6, jobs=1)
    )
    print(report)
    assert report.ok, str(report)
