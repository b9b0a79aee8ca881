"""Pages are written by hand but for their blocks, which say what the code says today.

    <!-- placed -->             in docs/compiler.md: what `placed()` of compiler.py, in this folder,
                                gives
    <!-- end -->

`python docs/generate [PAGE ...]` writes the blocks again, of all pages or of those that are named;
tests/test_pages.py holds the pages to them.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent
BLOCK = re.compile(r"^<!-- (\w+) -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)


def pages() -> list[str]:
    """The pages that have blocks: a file of this folder is named like its page."""
    return sorted(path.stem for path in HERE.glob("*.py") if path_of(path.stem).exists())


def path_of(page: str) -> Path:
    return DOCS / f"{page}.md"


def module_of(page: str) -> ModuleType:
    return importlib.import_module(f"generate.{page}")


def filled(page: str) -> str:
    """The page with its blocks as they should be."""
    module = module_of(page)

    def block(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n\n{getattr(module, found[1])()}\n\n<!-- end -->"

    return BLOCK.sub(block, path_of(page).read_text())


def code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text.strip()}\n```"


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
