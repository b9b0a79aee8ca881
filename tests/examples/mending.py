"""The example with a bug, with the credit that docs/tutorial.md adds."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BUG = "05_find_the_bug.py"


def mended(folder: Path) -> Path:
    """Example 05 as the tutorial puts it right, written to `folder`."""
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    (loop,) = re.findall(r"```python\n(for step in range.*?)```", tutorial, re.DOTALL)
    text = (ROOT / "examples" / BUG).read_text()
    broken = re.search(r"    for step in range.*?total \+= travelling\n", text, re.DOTALL)
    text = text.replace(broken.group(), textwrap.indent(loop, "    "))
    text = text.replace("tile_ready, out, tile: ", "tile_ready, inbox_free, out, tile: ")
    text = text.replace("inbox, tile_ready, out", "inbox, tile_ready, world.signals(1), out")
    right = "    right = (wl.rank(world) + 1) % wl.num_ranks(world)\n"
    left = "    left = (wl.rank(world) + wl.num_ranks(world) - 1) % wl.num_ranks(world)\n"
    path = folder / "mended.py"
    path.write_text(text.replace(right, right + left))
    return path
