"""Write the blocks of docs' pages again: `python docs/generate [PAGE ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from generate.blocks import filled, pages, path_of

for page in sys.argv[1:] or pages():
    before, after = path_of(page).read_text(), filled(page)
    if after != before:
        path_of(page).write_text(after)
        sys.stdout.write(f"docs/{page}.md is written again\n")
