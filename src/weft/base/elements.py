"""What the elements of a signal array stand for: `gathered_ready[chunk 2 from rank 1]`."""

from __future__ import annotations

# Of each axis what its places are called, and how many there are; the last one changes fastest.
Axes = tuple[tuple[str, int], ...]


class Element(int):
    """An index that is written as what it stands for; as a number behind the end of `axes`."""

    axes: Axes

    def __new__(cls, index: int, axes: Axes = ()) -> Element:
        self = super().__new__(cls, index)
        self.axes = axes
        return self

    def __getnewargs__(self) -> tuple[int, Axes]:
        return int(self), self.axes

    def __str__(self) -> str:
        places, rest = [], int(self)
        for title, extent in reversed(self.axes):
            rest, place = divmod(rest, max(extent, 1))
            if extent > 1:
                places.insert(0, f"{title} {place}")
        if rest or not places:
            return int.__repr__(self)
        # The rank comes last: it is a part of the sentence, not of a list.
        ranks = [one for one in places if " rank " in one]
        others = ", ".join(one for one in places if one not in ranks)
        return " ".join(filter(None, (others, *ranks)))
