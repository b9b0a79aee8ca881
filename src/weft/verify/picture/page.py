"""Pictures as one HTML file that needs nothing else: as on the terminal, with more of the past."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

from weft.base.report import Finding, Report
from weft.verify.picture.document import document, save
from weft.verify.picture.records import Picture
from weft.verify.picture.terminal import render

# A page has room for more than a terminal.
ROWS, LANES, WIDTH = 60, 16, 160


def write(path: str | os.PathLike[str], pictures: Sequence[Picture], report: Report) -> None:
    """Write the page of `pictures` to `path`.

    Raises  UsageError: the file cannot be written
    """
    save(path, page(pictures, report))


def page(pictures: Sequence[Picture], report: Report) -> str:
    """The text of the page."""
    sections = "\n".join(
        f'<section class="picture">\n{_finding(picture.finding)}\n'
        f'<pre class="diagram">{_markup(render(picture, WIDTH))}</pre>\n</section>'
        for picture in pictures
    )
    heading = str(report).splitlines()[0]
    style = Path(__file__).with_name("page.css")
    return document(f"{report.op}: what happened", heading, sections, [style])


def _finding(finding: Finding | None) -> str:
    """What is wrong, in a line; a table that follows it (who waits for what) is folded away."""
    if finding is None:
        return "<h2>the last steps</h2>"
    first, _, rest = finding.message.partition("\n")
    text = f'<h2>{escape(finding.kind)}</h2>\n<p class="message">{escape(first)}</p>'
    if rest:
        text += f"\n<details><summary>in words</summary><pre>{escape(rest)}</pre></details>"
    if finding.remedy:
        text += f'\n<p class="remedy">remedy: {escape(finding.remedy)}</p>'
    return text


def _markup(text: Text) -> str:
    """`text` with its styles as classes, which page.css has the colours of."""
    parts = []
    for segment in text.render(Console()):
        name = str(segment.style or "").replace("none", "").strip()
        said = escape(segment.text)
        parts.append(f'<span class="{name}">{said}</span>' if name else said)
    return "".join(parts)
