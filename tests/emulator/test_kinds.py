"""The kinds of findings: code, page and suites speak the same words."""

from __future__ import annotations

import re
from pathlib import Path

import weft.emulator
from weft.emulator.findings import ERRORS

ROOT = Path(__file__).parents[2]
SOURCE = Path(weft.emulator.__file__).parent
SUITE = ROOT / "tests" / "verify" / "wrong"

# `finding("kind", ...)`, `failure(None, SomeError, "kind", ...)`, `fail(SomeError, "kind", ...)`
FILED = re.compile(r'(?:Finding\(|\bfail(?:ure)?\(\s*(?:\w+,\s*)?\w+,)\s*"([\w ]+)"')

# By kind what docs/findings.md says of it.
_PAGE = (ROOT / "docs/findings.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", _PAGE, re.M | re.S))


def test_what_the_emulator_files_is_in_the_table():
    filed = {
        kind
        for path in SOURCE.glob("*.py")
        if path.stem != "script"  # files what a script raised, which is no finding of ours
        for kind in FILED.findall(path.read_text())
    }
    assert len(filed) >= 8
    assert filed <= set(ERRORS)


def test_the_page_explains_every_kind_and_names_its_error():
    assert list(SECTIONS) == list(ERRORS)
    for kind, text in SECTIONS.items():
        assert f"Raised as `{ERRORS[kind].__name__}`." in text
        assert "*How it comes about.*" in text and "*Remedy.*" in text, kind


def test_every_example_is_found_as_its_kind():
    examples = {
        kind: found[1]
        for kind, text in SECTIONS.items()
        if (found := re.search(r"Example: `tests/verify/wrong/(\w+)\.py`", text))
    }
    assert len(examples) >= 17
    for kind, example in examples.items():
        text = (SUITE / f"{example}.py").read_text()
        assert f'FOUND = "{kind}"' in text, example


def test_kinds_of_the_suite_are_in_the_table():
    found = {
        kind
        for path in SUITE.glob("*.py")
        for kind in re.findall(r'^FOUND = "(.*)"', path.read_text(), re.M)
    }
    assert found <= set(ERRORS)
