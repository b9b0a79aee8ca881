"""The page: one file that needs nothing else; in headless Chromium it runs without a complaint.

Where no Chromium is installed the markup is checked by a parser alone.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import in_chromium, look, stands_alone
from stories import Story, program, side, told_too_early, word

from weft.base.errors import UsageError
from weft.base.report import Finding, Report
from weft.emulator.observation import Recorder
from weft.emulator.script import run_script
from weft.verify.picture import draw, explain, page

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
    rows = [attrs for tag, attrs in markup.tags if "row" in attrs.get("class", "").split()]
    marks = [attrs for tag, attrs in markup.tags if "mark" in attrs.get("class", "").split()]
    assert len(rows) == len(marks) > 20
    assert {attrs["data-row"] for attrs in rows} == {attrs["data-row"] for attrs in marks}


def test_long_lines_are_wrapped():
    """Of the source, of messages, of tables in words; labels in a row of their own are cut."""
    style = pages().partition("<style>")[2].partition("</style>")[0]
    rules = dict(re.findall(r"^([^\n{}@]+) \{([^}]*)\}", style, re.M))
    wrapped = ("pre-wrap", "anywhere")
    assert "pre-wrap" in rules[".line"] and "anywhere" in rules[".line code"]
    assert all(word in rules[part] for part in ("details pre", ".detail") for word in wrapped)
    assert "overflow-wrap: break-word" in rules["body"] and "anywhere" in rules["h1"]
    unwrapped = {
        name for name, rule in rules.items() if re.search(r"white-space: (pre;|nowrap)", rule)
    }
    assert unwrapped == {".row", "button"}


def test_what_a_user_wrote_is_text_and_not_markup():
    text = pages()
    assert "<b>@rank4" not in text and "&lt;b&gt;@rank4" in text
    assert "<details><summary>in words</summary><pre>    &lt;a table&gt;</pre>" in text
    assert "ring & <others>" not in text and "ring &amp; &lt;others&gt;" in text


def test_a_file_that_cannot_be_written_is_misuse(tmp_path: Path):
    with pytest.raises(UsageError, match="No such file"):
        page.write(tmp_path / "nowhere" / "x.html", [], Report("ring", 2))


@pytest.fixture(scope="module")
def looked(tmp_path_factory):
    """(what Chromium saw, what it logged) of the page."""
    script = Path(__file__).with_name("look.js")
    return look(pages(), script, tmp_path_factory.mktemp("page"))


@in_chromium
def test_the_script_runs_without_a_complaint(looked):
    answer, log = looked
    assert answer["errors"] == []
    assert "CONSOLE" not in log, log


@in_chromium
def test_everything_is_drawn_and_nothing_lies_on_anything(looked):
    for seen in looked[0]["sections"]:
        assert seen["rows"] == seen["marks"] > 5
        assert seen["heads"] == seen["arrows"] > 1
        assert seen["lanes"] >= 2
        for clash in ("texts_on_texts", "marks_on_marks", "marks_on_arrows", "texts_on_drawing"):
            assert seen[clash] == 0, clash
        assert seen["beside"] < 1 and seen["svg_fits"] and seen["source_fits"]
    assert looked[0]["sections"][1]["arrows"] > 15


@in_chromium
def test_hovering_says_the_step_and_a_click_keeps_what_led_to_it(looked):
    race, crowded, _ = looked[0]["sections"]
    assert race["detail"].startswith("step 5, rank 1: ring (0), stream main\nreads inbox@rank1[3]")
    assert race["hot"] == ["6"]
    # Of A's steps the signal and what came before it, not the write that came too late.
    assert race["kept"] == [0, 1, 2, 5, 6]
    assert float(race["faint"]) < 0.5 and race["focus"] == "5" and race["released"]
    assert len(crowded["kept"]) > 10 and crowded["released"]


@in_chromium
def test_hovering_shows_the_line_of_the_source(looked):
    real = looked[0]["sections"][2]
    line = emulated()[1].first.line
    text = EXAMPLE.read_text().splitlines()[line - 1]
    assert text.strip() and real["hot_lines"] == [[str(line), text]]
    assert "at " + str(EXAMPLE) in real["detail"]


@in_chromium
def test_light_and_dark(looked):
    first, second, third = looked[0]["papers"]
    assert first == third != second
