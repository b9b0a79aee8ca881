"""What of a run a picture is about: of the finding's causal past what is nearest.

An event's past is what its party did before it, and the signals that its waits acquired. The past
of a finding can be a whole run; a reader needs the part that decides. Nearest is measured in hops,
of which some are longer than others: a signal says more than a poll.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from weft.emulator.observation import Event
from weft.verify.picture.anchors import AT_A_WORD
from weft.verify.picture.scene import Scene, word_key

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
