"""The demo's planted faults: the lines it takes out are there, and what is left is found out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.tools import console, demo
from weft.tools.check import Work
from weft.tools.main import main
from weft.tools.programs import find_op
from weft.tools.subjects import subjects_of_op


@pytest.mark.parametrize(
    "primitive, kinds",
    [("wait", {"race", "uninitialised"}), ("notify", {"unsatisfiable wait"})],
    ids=["wait", "notify"],
)
def test_what_is_taken_out_is_missed(primitive: str, kinds: set[str]):
    work = Work(find_op(demo.OPERATOR), demo.RANKS, demo.SMALL, "float32")
    report, line = demo.without(subjects_of_op(work), primitive)
    assert f"wl.{primitive}(" in Path(line.file).read_text().splitlines()[line.number - 1]
    assert kinds & {finding.kind for finding in report}, str(report)


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
