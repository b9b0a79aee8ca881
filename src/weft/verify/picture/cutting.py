"""Cuts the past of a finding to a screen: what is told twice goes, what is alike is one row."""

from __future__ import annotations

from collections.abc import Iterable

from weft.emulator.observation import Event
from weft.verify.picture.scene import Scene, lane_key
from weft.verify.picture.selection import nearest

# So many steps alike, one behind the other, are one row.
ALIKE = 3
MOST_IN_A_ROW = 3
MERGED = ("signal", "pass", "wait", "test", "load", "queue")


def choose(scene: Scene, max_rows: int, max_lanes: int) -> list[int]:
    """As much of the nearest past as makes at most `max_rows` rows, in order."""
    told_later = _told_later(scene)
    near = [at for at in _without_likes(scene, nearest(scene)) if at not in told_later]
    near = near[: MOST_IN_A_ROW * max_rows]
    # That somebody began, or ended, says nothing of one who did nothing else.
    doers = {
        lane_key(scene.events[at].party)
        for at in near
        if at in scene.anchors or scene.events[at].kind not in ("begin", "end")
    }
    lanes: list[object] = []
    found = []
    for at in near:
        lane = lane_key(scene.events[at].party)
        if lane in doers and lane not in lanes and len(lanes) < max_lanes:
            lanes.append(lane)
        if lane in lanes:
            found.append(at)
    while len(rows_of(scene, sorted(found))) > max_rows:
        found.pop()
    return sorted(found)


def _without_likes(scene: Scene, order: list[int]) -> Iterable[int]:
    """Of the anchors (a hundred programs may be stuck at a line) one for each rank and line."""
    seen = set()
    anchors = set(scene.anchors)
    for at in order:
        event = scene.events[at]
        if at in anchors and event.kind == "stuck":
            if like(event) in seen:
                continue
            seen.add(like(event))
        yield at


def like(event: Event) -> object:
    return (event.party.rank, event.party.what, event.place)


def _told_later(scene: Scene) -> set[int]:
    """Waits, and work in a queue, whose outcome has an event of its own, which tells more."""
    waiting: dict[object, int] = {}
    queued: dict[object, list[int]] = {}
    passed = set()
    for at, event in enumerate(scene.events):
        lane = lane_key(event.party)
        if event.kind == "queue":
            queued.setdefault(lane, []).append(at)
        elif event.kind == "begin":
            passed.update(queued.pop(lane, ()))
        elif event.kind == "wait":
            # Woken in vain, it waits again.
            passed.update({waiting[lane]} if lane in waiting else ())
            waiting[lane] = at
        elif event.kind in ("pass", "stuck") and lane in waiting:
            passed.add(waiting.pop(lane))
    return passed


def rows_of(scene: Scene, chosen: list[int]) -> list[list[int]]:
    """The chosen positions, several that are alike and follow each other as one row."""
    groups: list[list[int]] = []
    for at in chosen:
        if groups and _alike(scene, groups[-1][-1], at):
            groups[-1].append(at)
        else:
            groups.append([at])
    return [
        part
        for group in groups
        for part in ([group] if len(group) >= ALIKE else [[at] for at in group])
    ]


def _alike(scene: Scene, first: int, second: int) -> bool:
    a, b = scene.events[first], scene.events[second]
    if a.kind not in MERGED or a.kind != b.kind or lane_key(a.party) != lane_key(b.party):
        return False
    same_tensor = (a.word and a.word.tensor) == (b.word and b.word.tensor)
    return same_tensor and a.place == b.place
