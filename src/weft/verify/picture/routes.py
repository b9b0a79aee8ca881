"""Where arrows run: across in their start's row, down beside the lane they lead to, and in.

In a row only one party does something, and between lanes nobody does: an arrow meets no mark but
its own two. Gutter g lies left of lane g; arrows in it that overlap in time get a track each.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.verify.picture.records import Arrow, Picture


class Route(NamedTuple):
    """Track number `track` of the gutter left of lane `gutter`."""

    gutter: int
    track: int


def routes(picture: Picture) -> tuple[dict[Arrow, Route], list[int]]:
    """The route of each arrow, and how many tracks each gutter has (one more than lanes)."""
    found: dict[Arrow, Route] = {}
    gutters: list[list[list[tuple[Arrow, object]]]] = [[] for _ in range(len(picture.lanes) + 1)]
    for arrow in sorted(picture.arrows, key=lambda arrow: (arrow.end, arrow.start)):
        start, end = picture.rows[arrow.start].lane, picture.rows[arrow.end].lane
        gutter = end if start < end else end + 1
        # Signals of one wait may run together.
        joins = (arrow.end, arrow.kind)
        tracks = gutters[gutter]
        for track in tracks:
            if all(other == joins or not _overlap(arrow, a) for a, other in track):
                break
        else:
            track = []
            tracks.append(track)
        track.append((arrow, joins))
        found[arrow] = Route(gutter, tracks.index(track))
    return found, [len(tracks) for tracks in gutters]


def _overlap(a: Arrow, b: Arrow) -> bool:
    return a.start <= b.end and b.start <= a.end
