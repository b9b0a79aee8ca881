"""What a picture holds: the causal past of its finding, cut to fit, and the missing order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stories import FILE, Story, at, program, race, side, told_too_early, word

from weft.base.report import Finding, Report, Side
from weft.emulator.observation import Party
from weft.verify.picture import draw, explain


def texts(picture):
    return [f"{picture.lanes[row.lane].key} {row.text}" for row in picture.rows]


def arrows(picture):
    """(from row, to row, kind) in words."""
    said = texts(picture)
    return [(said[a.start], said[a.end], a.kind) for a in picture.arrows]


def test_a_race_shows_both_accesses_and_the_missing_arrow():
    picture = draw(*told_too_early())
    assert texts(picture) == [
        "B begins",
        "A begins",
        "A adds 1 to ready@rank1[0]: 0 → 1",
        "A wrote inbox@rank1[3]",
        "A ends",
        "B passes: ready@rank1[0] ≥ 1",
        "B reads inbox@rank1[3]",
    ]
    assert [row.mark for row in picture.rows][3] == "earlier"
    assert [row.mark for row in picture.rows][6] == "later"
    assert arrows(picture) == [
        ("A adds 1 to ready@rank1[0]: 0 → 1", "B passes: ready@rank1[0] ≥ 1", "order"),
        ("A wrote inbox@rank1[3]", "B reads inbox@rank1[3]", "missing"),
    ]
    assert (
        picture.absent
        == "signals tell B of A only up to step 2; the access came directly behind it"
    )
    assert [(lane.rank, lane.title) for lane in picture.lanes] == [(0, "ring (0)"), (1, "ring (0)")]


def test_a_wait_that_acquires_nothing_is_another_arrow():
    story, a, b = Story(), program(0), program(1)
    story.signal(a, word(1))
    story.passes(b, word(1), causes=[])
    story.found(b, "race", 5)
    picture = draw(story.events, race(b, a, None))
    assert [kind for *_, kind in arrows(picture)] == ["value", "missing"]
    assert picture.absent == "no signal tells B of A, whose access was at step 0"


def test_what_was_acquired_before_is_no_news():
    """A counter's second wait acquires both adds; the first of them was known already."""
    story, a, b = Story(), program(0), program(1)
    first = story.signal(a, word(1))
    story.passes(b, word(1), [first])
    second = story.signal(a, word(1), before=1)
    story.passes(b, word(1), [first, second], least=2)
    story.found(b, "uninitialised", 5)
    picture = draw(story.events, Finding("uninitialised", "nothing wrote it", side(b, 5, "reads")))
    assert [(a.start, a.end) for a in picture.arrows] == [(0, 1), (2, 3)]


def test_a_deadlock_shows_who_is_stuck_and_what_has_arrived():
    story, a, b, c = Story(), program(0), program(1), program(2)
    story.signal(b, word(0))
    story.tell("wait", a, 3, word=word(0), before=1, expected=2)
    story.tell("wait", c, 3, word=word(2), before=0, expected=1)
    story.tell("stuck", a, 3, word=word(0), before=1, expected=2)
    story.tell("stuck", c, 3, word=word(2), before=0, expected=1)
    story.tell("stuck", Party(0, "host"), 9, text="the work on stream main")
    finding = Finding("deadlock", "every program that is left waits", side(a, 3))
    picture = draw(story.events, finding)
    assert texts(picture) == [
        "B adds 1 to ready@rank0[0]: 0 → 1",
        "A stuck: ready@rank0[0] ≥ 2, sees 1",
        "C stuck: ready@rank2[0] ≥ 1, sees 0",
    ]
    assert [(a.start, a.end, a.kind) for a in picture.arrows] == [(0, 1, "order")]
    assert picture.elsewhere == ("rank 0 host: waits for the work on stream main (step 5)",)


def test_many_programs_at_one_line_are_one():
    story, signaller = Story(), program(0, 99)
    parties = [program(0, number) for number in range(40)]
    for party in parties:
        story.tell("wait", party, 3, word=word(0), before=0, expected=41)
    story.signal(signaller, word(0))
    for party in parties:
        story.tell("stuck", party, 3, word=word(0), before=1, expected=41)
    picture = draw(story.events, Finding("deadlock", "all wait", side(parties[0], 3)))
    stuck = [row for row in picture.rows if row.mark == "stuck"]
    assert len(stuck) == 1
    assert stuck[0].text == "stuck, 39 more too: ready@rank0[0] ≥ 41, sees 1"


def test_steps_alike_are_one_row_and_arrows_lead_from_it():
    story, a, b = Story(), program(0), program(1)
    signals = [story.signal(a, word(1, i)) for i in range(5)]
    story.passes(b, word(1, 4), signals[4:])
    story.found(b, "uninitialised", 5)
    picture = draw(story.events, Finding("uninitialised", "nothing wrote it", side(b, 5, "reads")))
    assert picture.rows[0].steps == (0, 1, 2, 3, 4)
    assert picture.rows[0].text.endswith("ready@rank1[4], 5 times")
    assert [(a.start, a.end) for a in picture.arrows] == [(0, 1)]
    assert (picture.shown, picture.total) == (7, 7)


@pytest.mark.parametrize("rows,lanes", [(6, 3), (20, 8), (60, 16)])
def test_a_long_run_is_cut_to_what_is_near_the_finding(rows, lanes):
    story, parties = Story(), [program(rank) for rank in range(30)]
    told = {}
    for turn in range(20):
        for party in parties:
            right = word((party.rank + 1) % 30)
            causes = [told[party.rank - 1]] if party.rank - 1 in told else []
            story.passes(party, word(party.rank), causes, line=turn)
            told[party.rank] = story.signal(party, right, line=100 + turn, before=turn)
    story.found(parties[7], "uninitialised", 5)
    finding = Finding("uninitialised", "nothing wrote it", side(parties[7], 5, "reads"))
    picture = draw(story.events, finding, dropped=1000, max_rows=rows, max_lanes=lanes)
    assert len(picture.rows) <= rows and len(picture.lanes) <= lanes
    assert picture.total == len(story.events) + 1000
    assert picture.rows[-1].mark == "finding" and picture.rows[-1].lane == len(
        [lane for lane in picture.lanes if lane.rank < 7]
    )
    assert all(a.start < a.end < len(picture.rows) for a in picture.arrows)
    # The signal that the finding's own last wait acquired is near enough for any size.
    assert any(a.end == len(picture.rows) - 3 for a in picture.arrows)


def test_launches_of_one_kernel_share_a_lane():
    story = Story()
    for launch in (1, 2):
        a = program(0, launch=launch)
        story.tell("queue", a._replace(program=None), 9, text="kernel ring[1, 1, 1]")
        story.tell("begin", a)
        story.signal(a, word(0), before=launch)
        story.tell("end", a)
    story.found(a, "signal", 2)
    picture = draw(story.events, Finding("signal", "set back", side(a, 2, "sets")))
    assert len(picture.lanes) == 1
    assert [row.mark for row in picture.rows][-1] == "finding"


def test_a_finding_that_is_a_signal_is_drawn_once():
    story, a = Story(), program(0)
    story.found(a, "signal", 2)
    story.tell("signal", a, 2, word=word(1), before=3, after=2, text="set")
    finding = Finding("signal", "set back", side(a, 2, "sets", tensor="ready@rank1", index=0))
    picture = draw(story.events, finding)
    assert texts(picture) == ["A sets ready@rank1[0]: 3 → 2"]
    assert picture.rows[0].mark == "finding"


def test_one_picture_for_each_kind_and_none_for_what_follows():
    events, first = told_too_early()
    report = Report("ring", 2)
    for finding in (
        first,
        race(program(1), program(0), 2, lines=(6, 4)),
        Finding("uninitialised", "nothing wrote it", side(program(1), 5, "reads")),
        Finding("error", "the sum is wrong", side(Party(0, "host"), 9)),
    ):
        assert report.add(finding)
    assert [p.finding.kind for p in explain(events, report)] == ["race", "uninitialised"]


def test_without_a_finding_or_its_place_the_end_of_the_run_is_drawn():
    story, a, b = Story(), program(0), program(1)
    told = story.signal(a, word(1))
    story.passes(b, word(1), [told])
    wrong = Finding("wrong answer", "off by 2", Side(rank=0, note="returns a wrong answer"))
    for picture in (*explain(story.events, Report("ring", 2)), draw(story.events, wrong)):
        assert [(a.start, a.end, a.kind) for a in picture.arrows] == [(0, 1, "order")]


def test_no_events_make_an_empty_picture():
    picture = draw([], race(program(1), program(0), None))
    assert picture.rows == () and picture.lanes == ()


def test_places_are_those_of_the_events():
    picture = draw(*told_too_early())
    assert picture.rows[2].place == at(2)
    assert picture.rows[3].place.outermost.file == FILE


def test_a_finding_made_at_the_end_is_drawn_where_its_signal_was():
    story, a, b = Story(), program(0), program(1)
    story.signal(a, word(1))
    story.signal(a, word(1), before=1, line=4)
    story.passes(b, word(1), [0, 1])
    story.found(a, "doubled signal", 4)
    finding = Finding(
        "doubled signal", "once more", side(a, 4, "adds", tensor="ready@rank1", index=0)
    )
    picture = draw(story.events, finding)
    assert [(row.step, row.mark) for row in picture.rows] == [
        (0, "signal"), (1, "finding"), (2, "pass"),
    ]  # fmt: skip


def test_the_second_side_of_a_finding_is_marked_too():
    story, a, b = Story(), program(0), program(1)
    story.tell("signal", a, 2, word=word(2), before=0, after=1, text="set")
    story.tell("end", a)
    story.found(b, "lost signal", 3)
    story.tell("signal", b, 3, word=word(2), before=1, after=2, text="set")
    what = {"tensor": "ready@rank2", "index": 0}
    picture = draw(
        story.events,
        Finding("lost signal", "gone", side(b, 3, "sets", **what), side(a, 2, "had set", **what)),
    )
    assert [row.mark for row in picture.rows] == ["earlier", "end", "finding"]
    assert not picture.arrows


def test_what_was_overwritten_is_seen_by_nobody():
    story, a, b, c = Story(), program(0), program(1), program(2)
    for party, value in ((a, 1), (b, 2)):
        story.tell("signal", party, 2, word=word(2), before=value - 1, after=value, text="set")
    story.passes(c, word(2), [1], least=2)
    story.found(c, "uninitialised", 5)
    picture = draw(story.events, Finding("uninitialised", "nothing wrote", side(c, 5, "reads")))
    assert [a.kind for a in picture.arrows] == ["order"]


def test_where_the_others_were_is_said():
    story, a = Story(), program(0)
    for number in (0, 1, 2):
        story.tell("begin", program(1, number))
        story.tell("end", program(1, number))
    work = Party(1, "kernel next", "main", None, 2)
    story.tell("queue", work, 9, text="kernel next[1, 1, 1]")
    story.tell("stuck", a, 3, word=word(0), before=0, expected=1)
    picture = draw(story.events, Finding("unsatisfiable wait", "nobody left", side(a, 3)))
    assert texts(picture) == ["A stuck: ready@rank0[0] ≥ 1, sees 0"]
    assert picture.elsewhere == (
        "rank 1 next: is queued, has not begun (step 6)",
        "rank 1 ring: 3 programs had ended, the last at step 5",
    )


def test_what_earlier_work_of_its_stream_acquired_is_known_too():
    """A barrier's kernel, say: another party in the same stream."""
    story, a, b = Story(), program(0), program(1, launch=2)
    barrier = Party(1, "kernel barrier", "main", (0, 0, 0), 1)
    told = story.signal(a, word(1))
    story.tell("begin", barrier)
    story.passes(barrier, word(1), [told])
    story.tell("end", barrier)
    story.tell("begin", b)
    story.tell("begin", a)
    step = story.signal(a, word(0))
    story.found(b, "race", 5)
    picture = draw(story.events, race(b, a, step))
    assert picture.absent == "signals tell B of A only up to step 0; the access was at step 6"
    elsewhere = Party(1, "kernel ring", "side", (0, 0, 0), 2)
    story.events[4] = replace(story.events[4], party=elsewhere)
    picture = draw(story.events, race(b, a, step))
    assert picture.absent == "no signal tells B of A, whose access was at step 6"


def test_a_host_that_raises_is_drawn_with_what_its_rank_and_the_others_did_last():
    story, a, b, host = Story(), program(0), program(1), Party(1, "host")
    told = story.signal(a, word(1))
    story.passes(b, word(1), [told])
    story.tell("end", host, 1)
    raised = Side.at(at(9), rank=1, kernel="host", note="raises")
    picture = draw(story.events, Finding("error", "AssertionError: the sum is wrong", raised))
    assert texts(picture) == [
        "A adds 1 to ready@rank1[0]: 0 → 1", "C passes: ready@rank1[0] ≥ 1", "B raises",
    ]  # fmt: skip
    assert picture.rows[-1].mark == "finding" and picture.rows[-1].place == at(9)
