"""Where emulated ranks' hosts meet: every host collective is an exchange of values.

The n-th call of a group is one `Meeting`. A rank that enters leaves its value and what it knows
of everybody's past; a rank that needs the others' values blocks, which lets the other ranks run.
A meeting that not everybody enters ends in the scheduler's deadlock report, which names who is
missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from weft.base.errors import CallOrderError, UsageError
from weft.base.place import Place
from weft.base.user_place import user_place
from weft.emulator.context import RankContext, current
from weft.emulator.hosts import Hosts


class Meeting:
    """One collective call of one group.

    Units   members: global ranks, in the group's order; values: by place in the group
    """

    def __init__(self, meetings: Meetings, key: Hashable, members: Sequence[int], what: str):
        self.meetings = meetings
        self.key = key
        self.members = tuple(members)
        self.what = what
        self.values: dict[int, Any] = {}
        self.pasts: dict[int, Any] = {}
        self.places: dict[int, Place] = {}
        self.shared: Any = None
        self.has_shared = False
        self.left = 0

    def missing(self) -> list[int]:
        """Global ranks that have not entered."""
        return [rank for i, rank in enumerate(self.members) if i not in self.pasts]

    def enter(self, what: str, position: int, value: Any, in_stream: bool) -> None:
        if what != self.what:
            first = next(iter(self.places))
            place = user_place()
            raise CallOrderError(
                f"rank {self.members[position]} calls {what} where rank {self.members[first]} "
                f"calls {self.what} (call {self.key[-1]} of group {list(self.members)}); "
                "every rank of a group makes the same calls in the same order\n"
                f"  rank {self.members[first]} at {self.places[first]}",
                place=place,
            )
        self.values[position] = value
        self.places[position] = user_place()
        self.pasts[position] = _context().past(in_stream)
        for watch in self.meetings.watches:
            watch.gave((self, position))
        self.meetings.hosts.scheduler.host_changed()

    def wait(
        self, position: int, sources: Sequence[int] | None = None, *, in_stream: bool = True
    ) -> list[Any]:
        """Everybody's values; blocks until `sources` (places in the group; all) have entered."""
        needed = range(len(self.members)) if sources is None else sources
        self.meetings.hosts.wait(lambda: all(i in self.pasts for i in needed), Missing(self))
        for watch in self.meetings.watches:
            for i in needed:
                watch.took((self, i))
        _context().learn((self.pasts[i] for i in needed), in_stream)
        return [self.values.get(i) for i in range(len(self.members))]

    def once(self, make: Callable[[], Any]) -> Any:
        """`make()`, computed by the first rank that asks; the same object for everybody."""
        if not self.has_shared:
            self.shared, self.has_shared = make(), True
        return self.shared

    def leave(self) -> None:
        """The rank has all it needs; the last one lets the meeting go."""
        self.left += 1
        if self.left == len(self.members):
            self.meetings.open.pop(self.key, None)


class Missing:
    """Why a rank waits, in words made only when a report asks for them."""

    remedy = "make the same collective calls on every rank, in the same order"

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting

    def __str__(self) -> str:
        meeting = self.meeting
        missing = meeting.missing()
        ranks = ", ".join(map(str, missing)) or "nobody"
        return (
            f"{meeting.what} on ranks {list(meeting.members)}: "
            f"rank{'s' if len(missing) > 1 else ''} {ranks} did not enter it"
        )


class Meetings:
    """All meetings of one session, and how often each rank has called in each group."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.watches = hosts.watches
        self.open: dict[Hashable, Meeting] = {}
        self.calls: dict[Hashable, int] = defaultdict(int)
        self._sent: dict[Hashable, int] = defaultdict(int)
        self._taken: dict[Hashable, int] = defaultdict(int)
        self.letters: dict[Hashable, list[tuple[Any, Any]]] = defaultdict(list)

    def enter(
        self, group: Hashable, members: Sequence[int], position: int, what: str, value: Any, *,
        in_stream: bool = True,
    ) -> Meeting:  # fmt: skip
        """Take part in this rank's next call of `group`; does not wait for the others.

        `in_stream`: the call belongs to the current stream, behind its earlier work; else to
        the host alone, which may be far ahead of its streams.
        """
        counter = (group, position)
        number = self.calls[counter]
        self.calls[counter] = number + 1
        key = (group, number)
        meeting = self.open.get(key)
        if meeting is None:
            meeting = self.open[key] = Meeting(self, key, members, what)
        meeting.enter(what, position, value, in_stream)
        return meeting

    def exchange(
        self, group: Hashable, members: Sequence[int], position: int, what: str, value: Any
    ) -> list[Any]:
        """Everybody's values, of a call that belongs to the hosts alone."""
        meeting = self.enter(group, members, position, what, value, in_stream=False)
        values = meeting.wait(position, in_stream=False)
        meeting.leave()
        return values

    def post(self, box: Hashable, value: Any) -> None:
        """Leave `value` in a mailbox; waits for nobody else."""
        context = _context()
        self._sent[box] += 1
        for watch in self.watches:
            watch.gave((box, self._sent[box]))
        self.letters[box].append((value, context.past()))
        self.hosts.scheduler.host_changed()

    def collect(self, boxes: Sequence[Hashable], why: str) -> tuple[int, Any]:
        """(which box, value) of the first letter in any of `boxes`; blocks until there is one."""

        def filled() -> int | None:
            return next((i for i, box in enumerate(boxes) if self.letters.get(box)), None)

        self.hosts.wait(lambda: filled() is not None, why)
        chosen = filled()
        self._taken[boxes[chosen]] += 1
        for watch in self.watches:
            letter = (boxes[chosen], self._taken[boxes[chosen]])
            watch.took(letter if len(boxes) == 1 else "whatever happens")
        value, past = self.letters[boxes[chosen]].pop(0)
        _context().learn([past])
        return chosen, value


def _context() -> RankContext:
    context = current()
    if context is None:
        raise UsageError(
            "emulated ranks meet in their own host code, not in a thread they started",
            place=user_place(),
        )
    return context
