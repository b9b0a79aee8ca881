"""The demo's planted faults: the lines it takes out are there, and what is left is found out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.tools import console, demo
from weft.tools.demo import IMPORTERS, SIGNAL, WAIT, Taken, first_finding, origin, without
from weft.tools.main import main


@pytest.mark.parametrize(
    "taken, kind", [(WAIT, "race"), (SIGNAL, "unsatisfiable wait")], ids=["wait", "signal"]
)
def test_what_is_taken_out_is_missed(taken: Taken, kind: str, tmp_path: Path):
    card, path, line = without(taken, tmp_path)
    assert "removed" in path.read_text().splitlines()[line - 1]
    report = first_finding(card)
    assert kind in {finding.kind for finding in report}, str(report)
    # What is said of a side begins at its kernel, whichever file its hook is from.
    files = {str(path), str(origin(IMPORTERS[0]))}
    assert files & {side.file for finding in report for side in finding.sides}, str(report)


@pytest.mark.parametrize("ok", [True, False])
def test_the_verb(ok: bool, monkeypatch, capsys):
    """Its chapters are told to stderr where JSON is asked for; one that fails gives 1."""

    def shown() -> bool:
        console.results().print("a chapter")
        return ok

    monkeypatch.setattr(demo, "shown", shown)
    assert main(["demo"]) == (0 if ok else 1)
    assert capsys.readouterr().out == "a chapter\n"
    assert main(["demo", "--json"]) == (0 if ok else 1)
    told = capsys.readouterr()
    assert json.loads(told.out)["ok"] is ok and told.err == "a chapter\n"


@pytest.mark.slow
def test_all_of_it(capsys):
    assert main(["demo"]) == 0
    told = capsys.readouterr().out
    assert "Is the answer right?" in told and told.count("found under schedule") == 2
    assert "Checked after compilation" in told and "weft doctor" in told
