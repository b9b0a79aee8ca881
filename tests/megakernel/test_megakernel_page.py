"""docs/megakernel.md is what graphs and queues are today."""

from __future__ import annotations

from pathlib import Path

from weft.megakernel.page import page

PAGE = Path(__file__).parent.parent.parent / "docs" / "megakernel.md"


def test_the_page_is_what_is_made():
    assert PAGE.read_text() == page(), "run python -m weft.megakernel.page > docs/megakernel.md"
