"""docs/reading_a_failure.md says what is printed today."""

from __future__ import annotations

import re

import pytest
import reading

PAGE = reading.ROOT / "docs" / "reading_a_failure.md"
WRITE_IT = "run python tests/verify/picture/reading.py > docs/reading_a_failure.md"
EXAMPLES = reading.examples()


def sections(text: str) -> dict[str, str]:
    """The page's sections by title; what stands before the first has the title ""."""
    titled = re.split(r"^## (.*)\n", text, flags=re.M)
    return {"": titled[0], **dict(zip(titled[1::2], titled[2::2]))}


def lasting(text: str) -> str:
    """The text without what a change elsewhere moves: counts of steps, lines of shared files."""
    text = re.sub(r"\b(pieces|programs)\.py:\d+", r"\1.py:N", text)
    text = re.sub(r"\b(step|steps) \d+|\d+ of \d+ steps", "step N", text)
    return re.sub(r"^ {2,}\d+  ", "N ", text, flags=re.M)


@pytest.fixture(scope="module")
def kept() -> dict[str, str]:
    return sections(PAGE.read_text())


def test_the_page_has_a_section_for_each_kind_that_has_an_example(kept):
    there = [title for title in kept if title.lower() in reading.KINDS]
    assert there == [kind.name[0].upper() + kind.name[1:] for kind in EXAMPLES], WRITE_IT
    introduction = sections(reading.INTRODUCTION)
    assert {title: kept[title].strip() for title in introduction} == {
        title: text.strip() for title, text in introduction.items()
    }, WRITE_IT


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.name)
def test_what_is_printed_is_what_the_page_shows(kind, kept):
    (title, text), *_ = list(sections(reading.section(kind)).items())[1:]
    assert lasting(text).strip() == lasting(kept[title]).strip(), WRITE_IT
