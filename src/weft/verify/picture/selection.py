"""What of a run a picture shows: of the finding's causal past what is nearest, cut to a screen.

An event's past is what its party did before it, and the signals that its waits acquired. The past
of a finding can be a whole run; a reader needs the part that decides. Nearest is measured in hops,
of which some are longer than others: a signal says more than a poll.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from weft.emulator.observation import Event
from weft.verify.picture.anchors import AT_A_WORD
from weft.verify.picture.scene import Scene, lane_key, word_key

# How far an event is from what follows it, by its kind; what is not named is far.
HOPS = {
    "signal": 2, "pass": 2, "stuck": 1, "access": 1, "finding": 1, "wait": 3, "begin": 4, "end": 4,
}  # fmt: skip
FAR = 7
# Past this the reader is in another story.
HORIZON = 22
# Of the signals of a word that a finding is about, and of what a racing party did next.
NEIGHBOURS = 4


def nearest(scene: Scene) -> list[int]:
    """The positions of the scene's past, the nearest first, up to the horizon."""
    past = _Past(scene)
    distance: dict[int, int] = {}
    queue = [(0, -at, at) for at in scene.anchors]
    heapq.heapify(queue)
    order = []
    while queue:
        far, _, at = heapq.heappop(queue)
        if at in distance:
            continue
        distance[at] = far
        order.append(at)
        for other in past.of(at):
            hop = far + _hop(scene.events[other])
            if other not in distance and hop <= HORIZON:
                heapq.heappush(queue, (hop, -other, other))
    return order


def _hop(event: Event) -> int:
    # A poll that acquired something is a wait that passed.
    return HOPS["pass"] if event.causes else HOPS.get(event.kind, FAR)


class _Past:
    """Who comes directly before an event: in its lane, by a signal, or at the finding's word."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.lanes = scene.lanes
        self.words: dict[object, list[int]] = {}
        for at, event in enumerate(scene.events):
            if event.kind in AT_A_WORD and event.word is not None:
                self.words.setdefault(word_key(event), []).append(at)

    def of(self, at: int) -> Iterator[int]:
        event = self.scene.events[at]
        yield from self.lanes.before(at)
        yield from self.scene.news.get(at, ())
        yield from self.scene.unordered.get(at, ())
        if at in self.scene.anchors and event.word is not None:
            same = self.words.get(word_key(event), ())
            yield from [i for i in same if i < at][-NEIGHBOURS:]
            yield from [i for i in same if i > at][:NEIGHBOURS]
        if at == self.scene.earlier:
            # What it did next: the signal that should have told of the access may be there.
            later = self.scene.later if self.scene.later is not None else len(self.scene.events)
            after = [i for i in self.lanes.after(at) if i < later]
            yield from after[:NEIGHBOURS]


# ---------------------------------------------------------------------------------------------
# Cut to a screen: what is said twice goes, what is alike is one row

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
