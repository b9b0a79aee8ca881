"""The layout of a picture: parties across, steps down, signals as arrows. Pure data, no drawing.

A row is one step of one party, so that nothing lies beside it and time is the order of rows. What
is drawn is chosen in `selection`; here it is cut to fit, put in columns and joined by arrows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from weft.base.report import Finding
from weft.emulator.observation import Event
from weft.verify.picture.anchors import scene_of
from weft.verify.picture.records import Arrow, Lane, Picture, Row
from weft.verify.picture.scene import LOOKS, Scene, lane_key, word_key
from weft.verify.picture.selection import choose, like, rows_of
from weft.verify.picture.wording import absent, elsewhere, event_text, party_title, word_text

# A screen's worth: what is more is no picture any longer.
MAX_ROWS = 20
MAX_LANES = 8


def explain(
    events: Sequence[Event], findings: Iterable[Finding], *, dropped: int = 0,
    max_rows: int = MAX_ROWS, max_lanes: int = MAX_LANES,
) -> list[Picture]:  # fmt: skip
    """A picture for the first finding of each kind, e.g. of a report.

    `events` is one run that shows them, of which the first `dropped` are lost. Where nothing was
    found there is one picture, of how the run ended.
    """
    return [
        draw(events, finding, dropped=dropped, max_rows=max_rows, max_lanes=max_lanes)
        for finding in firsts(findings) or [None]
    ]


def firsts(findings: Iterable[Finding]) -> list[Finding]:
    """The first finding of each kind; what a script raises follows from what else was found."""
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.kind, finding)
    if len(first) > 1:
        first.pop("error", None)
    return list(first.values())


def draw(
    events: Sequence[Event], finding: Finding | None, *, dropped: int = 0,
    max_rows: int = MAX_ROWS, max_lanes: int = MAX_LANES,
) -> Picture:  # fmt: skip
    """The picture of `finding`, or of the end, in the run that `events` are."""
    scene = scene_of(events, finding)
    groups = rows_of(scene, choose(scene, max_rows, max_lanes))
    lanes, column = _lanes(scene, groups)
    rows = tuple(_row(scene, group, column, finding) for group in groups)
    arrows = _arrows(scene, groups)
    others, order = elsewhere(scene, groups, column), absent(scene, column, lanes)
    return Picture(
        finding, lanes, rows, arrows, others, order,
        sum(len(row.steps) for row in rows), len(events) + dropped,
    )  # fmt: skip


def _lanes(scene: Scene, groups: list[list[int]]) -> tuple[tuple[Lane, ...], dict[object, int]]:
    """The columns, by rank, the host first; and the column of each lane's key."""
    events = scene.events
    used = {lane_key(events[group[0]].party): events[group[0]].party for group in groups}
    spans: dict[tuple[object, ...], list[Event]] = {key: [] for key in used}
    for event in events:
        if lane_key(event.party) in spans:
            spans[lane_key(event.party)].append(event)

    def order(key: tuple[object, ...]) -> tuple:
        party = used[key]
        is_host = party.what == "host"
        return (party.rank, not is_host, party.stream, party.what, party.program or ())

    lanes = []
    steps = [events[group[0]].step for group in groups]
    for number, key in enumerate(sorted(used, key=order)):
        party, mine = used[key], spans[key]
        begun = mine[0].step
        first = next((i for i, step in enumerate(steps) if step >= begun), 0)
        last = len(groups) - 1
        if mine[-1].kind == "end":
            last = max(i for i, step in enumerate(steps) if step <= mine[-1].step)
        lanes.append((key, Lane(
            chr(ord("A") + number), party.rank, party_title(party), party.stream, first, last,
        )))  # fmt: skip
    return tuple(lane for _, lane in lanes), {key: i for i, (key, _) in enumerate(lanes)}


def _row(scene: Scene, group: list[int], column: dict[object, int], finding: Finding | None) -> Row:
    events = [scene.events[at] for at in group]
    event = events[-1]
    text = event_text(event)
    mark = "pass" if event.kind in LOOKS and event.causes else event.kind
    if finding is None:
        pass
    elif scene.later in group:
        mark, text = "later", f"{finding.first.note} {word_text(event.word)}"
    elif scene.earlier in group:
        mark = "earlier"
    elif event.kind == "finding":
        text = _finding_text(finding, event)
    elif event.kind == "signal" and group[-1] in scene.anchors:
        mark = "finding"
    if len(events) > 1:
        text = f"{event_text(events[0])} … {word_text(event.word)}, {len(events)} times"
    elif event.kind == "stuck":
        more = Counter(like(scene.events[at]) for at in scene.anchors)[like(event)] - 1
        text = text.replace("stuck:", f"stuck, {more} more too:") if more > 0 else text
    return Row(
        column[lane_key(event.party)], tuple(e.step for e in events), mark, text, event.place
    )


def _finding_text(finding: Finding, event: Event) -> str:
    note = finding.first.note
    if note and event.word is not None:
        return f"{note} {word_text(event.word)}"
    return note or f"fails: {finding.message.splitlines()[0]}"


def _arrows(scene: Scene, groups: list[list[int]]) -> tuple[Arrow, ...]:
    """From each signal that is drawn to whoever acquired it, and the one that is missing."""
    row_of = {at: row for row, group in enumerate(groups) for at in group}
    lane_of = [lane_key(scene.events[group[0]].party) for group in groups]
    found = []
    for at, row in row_of.items():
        causes = dict.fromkeys(scene.unordered.get(at, ()), "value")
        causes |= dict.fromkeys([*scene.news.get(at, ()), *_arrived(scene, at)], "order")
        for cause, kind in causes.items():
            start = row_of.get(cause)
            if start is not None and start < row and lane_of[start] != lane_of[row]:
                found.append(Arrow(start, row, kind))
    arrows = list(dict.fromkeys(found))
    if scene.earlier in row_of and scene.later in row_of:
        arrows.append(Arrow(row_of[scene.earlier], row_of[scene.later], "missing"))
    return tuple(arrows)


def _arrived(scene: Scene, at: int) -> list[int]:
    """Of the signals that a stuck wait counts, those that have arrived."""
    event = scene.events[at]
    if event.kind != "stuck" or event.word is None:
        return []
    return [
        i for i, other in enumerate(scene.events[:at])
        if other.kind == "signal" and word_key(other) == word_key(event)
    ]  # fmt: skip
