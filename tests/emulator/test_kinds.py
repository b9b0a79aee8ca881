"""One table of the kinds of findings: code and suites speak its words."""

from __future__ import annotations

import re
from pathlib import Path

import weft.emulator
from weft.emulator.kinds import KINDS

ROOT = Path(__file__).parents[2]
SOURCE = Path(weft.emulator.__file__).parent
SUITE = ROOT / "tests" / "verify" / "wrong"

# `finding("kind", ...)`, `failure(None, SomeError, "kind", ...)`, `fail(SomeError, "kind", ...)`
FILED = re.compile(r'(?:Finding\(|\bfail(?:ure)?\(\s*(?:\w+,\s*)?\w+,)\s*"([\w ]+)"')


def test_what_the_emulator_files_is_in_the_table():
    filed = {
        kind
        for path in SOURCE.glob("*.py")
        if path.stem != "script"  # files what a script raised, which is no finding of ours
        for kind in FILED.findall(path.read_text())
    }
    assert len(filed) >= 8
    assert filed <= set(KINDS)


def test_every_example_is_found_as_its_kind():
    for kind in KINDS.values():
        if kind.example:
            text = (SUITE / f"{kind.example}.py").read_text()
            assert f'FOUND = "{kind.name}"' in text, kind.example


def test_kinds_of_the_suite_are_in_the_table():
    found = {
        kind
        for path in SUITE.glob("*.py")
        for kind in re.findall(r'^FOUND = "(.*)"', path.read_text(), re.M)
    }
    assert found <= set(KINDS)
