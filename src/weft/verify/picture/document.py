"""One HTML file that needs nothing else: what all of weft's pages have, light and dark."""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape
from pathlib import Path

from weft.base.errors import UsageError

_HERE = Path(__file__).parent


def document(title: str, heading: str, body: str, parts: Iterable[Path]) -> str:
    """The text of a page; `parts` are files of style (.css) and of script (.js) of its own."""
    own = list(parts)
    style, script = (
        "".join(
            part.read_text(encoding="utf-8")
            for part in (_HERE / f"document{kind}", *own)
            if part.suffix == kind
        )
        for kind in (".css", ".js")
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="weft">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{escape(heading)}</h1><button id="theme" type="button">light / dark</button></header>
{body}
<script>
{script}</script>
</body>
</html>
"""


def save(path: str | os.PathLike[str], text: str) -> None:
    """Raises  UsageError: the file cannot be written"""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {os.fspath(path)}: {error.strerror}") from None
