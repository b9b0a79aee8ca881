"""docs/compiler.md is what the compiler says today."""

from __future__ import annotations

from pathlib import Path

from weft.compiler.page import page

PAGE = Path(__file__).parent.parent.parent / "docs" / "compiler.md"


def test_the_page_is_what_the_compiler_does():
    assert PAGE.read_text() == page(), "run python -m weft.compiler.page > docs/compiler.md"
