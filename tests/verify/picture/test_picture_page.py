"""The page: one file that needs nothing else, drawn as on the terminal."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from browser import stands_alone
from stories import Story, program, side, told_too_early, word

from weft.base.errors import UsageError
from weft.base.report import Finding, Report
from weft.emulator.observation import Recorder
from weft.emulator.script import run_script
from weft.verify.picture import draw, explain, page
from weft.verify.picture.terminal import render

EXAMPLE = Path(__file__).parents[3] / "examples" / "05_find_the_bug.py"


def crowd():
    """Ten ranks that signal each other around a ring and across it, and one finding."""
    story, parties = Story(), [program(rank) for rank in range(10)]
    told = {rank: [] for rank in range(10)}
    for turn in range(3):
        for party in parties:
            for peer in ((party.rank + 1) % 10, (party.rank + 5) % 10):
                told[peer].append(story.signal(party, word(peer), before=len(told[peer])))
        for party in parties:
            story.passes(party, word(party.rank), told[party.rank], least=2 * turn + 2)
    story.found(parties[4], "out of bounds", 5)
    finding = Finding(
        "out of bounds", "writes element 7 <of> 6 & more:\n    <a table>",
        side(parties[4], 5, "writes", tensor='"quoted" & <b>@rank4', index=7), remedy="mask it",
    )  # fmt: skip
    return story.events, finding


def emulated():
    """A run of the example that races, as it is printed for a user."""
    recorder = Recorder()
    report = run_script(str(EXAMPLE), [], ranks=4, seed=1, observers=[recorder])
    return recorder.events, report.races[0]


def pages():
    report = Report("ring & <others>", 10)
    early, race = told_too_early()
    report.add(race)
    limits = {"max_rows": page.ROWS, "max_lanes": page.LANES}
    drawn = [draw(*what, **limits) for what in (crowd(), emulated())]
    return page.page([*explain(early, report), *drawn], report)


def test_the_markup_nests_and_refers_to_nothing_outside():
    text = pages()
    markup = stands_alone(text)
    sections = [attrs for tag, attrs in markup.tags if tag == "section"]
    assert len(sections) == 3


def test_it_is_drawn_as_on_the_terminal_with_more_of_the_past():
    drawing = pages().partition('<pre class="diagram">')[2].partition("</pre>")[0]
    seen = html.unescape(re.sub(r"<[^>]*>", "", drawing))
    early, race = told_too_early()
    assert seen == render(*explain(early, [race]), page.WIDTH).plain
    assert re.search('class="[^"]*red">◆', drawing) and re.search('class="[^"]*green">●', drawing)
    rows = [draw(*crowd(), **size).shown for size in ({}, {"max_rows": page.ROWS})]
    assert rows[0] < rows[1]


def test_every_style_has_its_colour():
    text = pages()
    style = text.partition("<style>")[2].partition("</style>")[0]
    used = {word for names in re.findall(r'<span class="([^"]*)"', text) for word in names.split()}
    assert used and all(f".{word} {{" in style for word in used), used


def test_what_a_user_wrote_is_text_and_not_markup():
    text = pages()
    assert "<b>@rank4" not in text and "&lt;b&gt;@rank4" in text
    assert "<details><summary>in words</summary><pre>    &lt;a table&gt;</pre>" in text
    assert "ring & <others>" not in text and "ring &amp; &lt;others&gt;" in text


def test_a_file_that_cannot_be_written_is_misuse(tmp_path: Path):
    with pytest.raises(UsageError, match="No such file"):
        page.write(tmp_path / "nowhere" / "x.html", [], Report("ring", 2))
