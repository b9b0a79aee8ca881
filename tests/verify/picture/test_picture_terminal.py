"""Pictures as text: what is drawn, within how many columns, and that it needs no colour."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from stories import Story, program, race, side, told_too_early, word

from weft.base.place import Frame, Place
from weft.base.report import Finding, Side
from weft.verify.picture import draw
from weft.verify.picture.terminal import WIDTH, print_pictures, render

TOLD_TOO_EARLY = """\
race at /nowhere/ring.py:5, 7 of 7 steps
  A  rank 0: ring (0), stream main
  B  rank 1: ring (0), stream main

  step  A    B
     0       ┬   B begins                                                                     line 1
     1  ┬    │   A begins                                                                     line 1
     2  ●─╮  │   A adds 1 to ready@rank1[0]: 0 → 1                                            line 2
     2  ◆╌┼╮ │   A wrote inbox@rank1[3]                                                       line 4
     3  ┴ │╎ │   A ends                                                                       line 1
     4    ╰┼▶○   B passes: ready@rank1[0] ≥ 1                                                 line 3
     5     ╰▶◆   B reads inbox@rank1[3]                                                       line 5

  missing (dashed): signals tell B of A only up to step 2; the access came directly behind it"""


def diagram(picture):
    """The drawn part of each row: what stands between the step and the words."""
    lines = render(picture).plain.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("  step")) + 1
    return [line[8:].split("   ")[0].rstrip() for line in lines[start : start + len(picture.rows)]]


def test_the_whole_of_a_race():
    assert render(draw(*told_too_early())).plain == TOLD_TOO_EARLY


def test_signals_of_one_wait_run_together_and_others_beside():
    story, parties = Story(), [program(rank) for rank in range(3)]
    a, b, c = parties
    one, two = story.signal(a, word(2)), story.signal(b, word(2), before=1)
    other = story.signal(a, word(2, 1))
    story.passes(c, word(2), [one, two], least=2)
    story.passes(c, word(2, 1), [other])
    story.found(c, "uninitialised", 5)
    picture = draw(story.events, Finding("uninitialised", "never written", side(c, 5, "reads")))
    lines = render(picture).plain.splitlines()
    drawn = [line[6:24].rstrip() for line in lines if line[:6].strip().isdigit()]
    assert drawn == [
        "  ●──────╮      A",
        "  │    ●─┤      B",
        "  ●────┼─┼╮     A",
        "  │    │ ╰┼▶○   C",
        "  │    │  ╰▶○   C",
        "  │    │    ◆   C",
    ]


@pytest.mark.parametrize("width", [60, 80, WIDTH])
def test_no_line_is_wider_than_asked_for(width, tmp_path):
    source = tmp_path / "a_script_with_quite_a_long_name_for_a_script.py"
    story, parties = Story(), [program(rank, 7) for rank in range(12)]
    for party in parties:
        peer = word((party.rank + 1) % 12, 12345, "a_signal_with_a_long_name")
        story.signal(party, peer)
        story.passes(party, peer, [story.events[-1].step])
    place = Place((Frame(str(source), 4, "main"),))
    story.found(parties[0], "uninitialised", 4)
    finding = Finding(
        "uninitialised", "never written",
        Side.at(place, rank=0, kernel="ring", program=(7, 0, 0), note="reads " + "z" * 100),
    )  # fmt: skip
    text = render(draw(story.events, finding), width).plain
    assert max(map(len, text.splitlines())) <= width
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_colour_adds_nothing_but_colour():
    plain, coloured = io.StringIO(), io.StringIO()
    picture = draw(*told_too_early())
    print_pictures(Console(file=plain, width=WIDTH), [picture])
    print_pictures(
        Console(file=coloured, width=WIDTH, force_terminal=True, color_system="truecolor"),
        [picture],
    )
    assert "\x1b[" in coloured.getvalue()
    from rich.text import Text

    stripped = Text.from_ansi(coloured.getvalue()).plain
    assert [s.rstrip() for s in stripped.splitlines()] == plain.getvalue().splitlines()


def test_a_race_of_one_party_turns_back_to_it():
    """An asynchronous access and the next one of the same program."""
    story, a = Story(), program(0)
    step = story.tell("begin", a)
    story.found(a, "race", 5)
    picture = draw(story.events, race(a, a, step))
    assert diagram(picture)[-2:] == ["◆╌╮", "◆◀╯"]
    assert picture.absent == "nothing waits for the asynchronous access of step 0 to end"


def test_one_seed_is_one_picture():
    assert render(draw(*told_too_early())).plain == render(draw(*told_too_early())).plain


def test_a_terminal_that_knows_ascii_alone_is_given_nothing_else():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    print_pictures(Console(file=file, width=WIDTH), [draw(*told_too_early())])
    file.flush()
    shown = raw.getvalue().decode("ascii").splitlines()
    assert max(map(len, shown)) <= WIDTH
    assert [line[:52].rstrip() for line in shown[8:12]] == [
        "     2  *-.  |   A adds 1 to ready@rank1[0]: 0 -> 1",
        "     2  #~+. |   A wrote inbox@rank1[3]",
        "     3  ^ |: |   A ends",
        "     4    '+>o   B passes: ready@rank1[0] >= 1",
    ]
