"""Pages that weft writes, looked at: by a parser, and in headless Chromium where there is one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

VOID = {"meta", "link", "br"}
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars"
    " --disable-background-networking --disable-component-update --disable-sync"
    " --window-size=1300,900 --enable-logging=stderr --virtual-time-budget=2000"
).split()
in_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")

LISTEN = "<script>window.errors = []; onerror = (said) => errors.push(String(said));</script>"


class Markup(HTMLParser):
    """Complains of tags that do not nest; collects what refers elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def stands_alone(text: str) -> Markup:
    """The page's markup, which nests and refers to nothing outside."""
    markup = Markup()
    markup.feed(text)
    assert markup.open == []
    assert markup.links == ["data:,"]
    # A name space is no place that anything is read from.
    named = text.replace('"http://www.w3.org/2000/svg"', "").replace("url(#", "(#")
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", named)
    return markup


def look(text: str, script: Path, folder: Path) -> tuple[Any, str]:
    """What `script` found on the page, as it left it in `answer`, and what Chromium logged."""
    there = f'<pre id="answer"></pre><script>{script.read_text()}</script>'
    text = text.replace("<head>", "<head>" + LISTEN).replace("</body>", there + "</body>")
    (folder / "page.html").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom",
         (folder / "page.html").as_uri()],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    found = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.S)
    assert found and found[1], done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), done.stderr
