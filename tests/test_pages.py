"""What pages of docs/ say of the code, between their markers, is what the code says today."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# As a package: tests have modules of their own that are called as pages are.
sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))

from generate import blocks

PAGES = blocks.pages()


def test_every_file_of_the_folder_has_its_page():
    files = {path.stem for path in blocks.HERE.glob("*.py")} - {"__main__", "blocks"}
    assert files == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_current(page: str):
    lasting = getattr(blocks.module_of(page), "lasting", str)
    kept = blocks.path_of(page).read_text()
    assert lasting(kept) == lasting(blocks.filled(page)), f"run python docs/generate {page}"


@pytest.mark.parametrize("page", PAGES)
def test_markers_come_in_pairs(page: str):
    text = blocks.path_of(page).read_text()
    names = [found[1] for found in blocks.BLOCK.finditer(text)]
    assert len(names) == text.count("<!-- ") / 2 == len(set(names))
