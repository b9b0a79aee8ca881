"""docs/generated_kernels.md is what is generated today."""

from __future__ import annotations

from pathlib import Path

from weft.compiler.kernel_page import page

PAGE = Path(__file__).parent.parent.parent / "docs" / "generated_kernels.md"


def test_the_page_is_what_is_generated():
    assert PAGE.read_text() == page(), (
        "run python -m weft.compiler.kernel_page > docs/generated_kernels.md"
    )
