"""The demo's planted faults: the lines it takes out are there, and what is left is found out."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.tools.demo import OPERATOR, SIGNAL, WAIT, Taken, first_finding, origin, without


@pytest.mark.parametrize(
    "taken, kind", [(WAIT, "race"), (SIGNAL, "unsatisfiable wait")], ids=["wait", "signal"]
)
def test_what_is_taken_out_is_missed(taken: Taken, kind: str, tmp_path: Path):
    card, path, line = without(taken, tmp_path)
    assert "removed" in path.read_text().splitlines()[line - 1]
    report = first_finding(card)
    assert kind in {finding.kind for finding in report}, str(report)
    # A wait is told of where it stands, whichever file its signal is missing from.
    files = {str(path), str(origin(OPERATOR))}
    assert files & {side.file for finding in report for side in finding.sides}, str(report)
