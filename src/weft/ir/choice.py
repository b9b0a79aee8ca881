"""What a pass has chosen, and why: for the reader of a program or a plan."""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.place import UNKNOWN, Place


@dataclass(frozen=True)
class Choice:
    """Of `subject`, a task or a buffer, `what` is `taken`, because of `why`."""

    subject: str
    what: str
    taken: str
    why: str
    place: Place = UNKNOWN
