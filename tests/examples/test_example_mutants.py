"""Every mutant of every example: what a newcomer copies has no signal too many, nor too few."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.base.topology import Topology
from weft.tools.mutants import mutants_of_script
from weft.verify.mutants import Bounds

ROOT = Path(__file__).parent.parent.parent
NODES = {"10_two_nodes.py": (2, 2)}
BUG = "05_find_the_bug.py"  # has no signal to spare
QUICK = "03_signal.py"


def cases():
    for path in sorted((ROOT / "examples").glob("[0-9]*.py")):
        if path.name != BUG:
            marks = () if path.name == QUICK else pytest.mark.slow
            yield pytest.param(path, id=path.name, marks=marks)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", cases())
def test_every_signal_is_needed(path: Path):
    nodes = NODES.get(path.name, (4,))
    report = mutants_of_script(str(path), [], Topology.of(nodes=nodes), Bounds(schedules=6, jobs=1))
    print(report)
    assert report.ok, str(report)
    assert len(report.verdicts) >= 8
