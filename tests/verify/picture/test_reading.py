"""The example of every kind of finding can be drawn: the picture shows its line, its parties."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "docs"))

from generate import reading_a_failure as reading


@pytest.mark.few(9)
@pytest.mark.parametrize("kind", reading.EXAMPLES)
def test_every_kind_is_drawn(kind: str):
    _, finding, recorder = reading.seen(kind)
    picture = reading.render(reading.draw(recorder.events, finding)).plain
    place, parties = picture.splitlines()[0], re.findall(r"^  [A-Z]  (.*)", picture, re.M)
    assert place.startswith(f"{kind} at ") and parties, picture
    lines = picture.splitlines()
    assert any(re.search(r"[◆✗●○]", line) for line in lines), picture
    text = Path(reading.DOCS.parent / reading.EXAMPLES[kind]).read_text().splitlines()
    guilty = [number for number, line in enumerate(text, 1) if "BUG" in line]
    said = f"{finding}\n{picture}"
    assert any(re.search(rf"(?:line |:){number}\b", said) for number in guilty), said
