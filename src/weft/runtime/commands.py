"""What a call queues, kept in order, with open addresses: launches, copies, waits of streams.

    commands.copy("copy", dst, src, nbytes)     dst, src: a place, and bytes behind its begin
    commands.run(places)                        on the current stream, which is "main", and others

Command lists of plans (plan/command_list.py) and calls compiled ahead of time (artefact.py) are
such. Nothing here asks torch for more than the current stream, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# A place, and how far behind its begin.
Address = tuple[int, int]
# places, the stream that is current
Command = Callable[[Sequence[int], Any], None]


class Commands:
    """Of one world; streams are named as `World.stream` does."""

    def __init__(self, world: Any) -> None:
        self._world, self._direct = world, world.backend.by_address
        self._commands: list[Command] = []
        # By stream, what tells the driver's number of it.
        self._handles: dict[str, Callable[[Any], int]] = {}

    def run(self, places: Sequence[int]) -> None:
        """Queue all of it on the current stream, and on others as they were."""
        current = self._world.current_stream()
        for command in self._commands:
            command(places, current)

    # ---- what is queued, in this order

    def call(self, stream: str, launch: Callable[[Sequence[int], int], None]) -> None:
        """`launch` is given the places and the stream's handle."""
        handle = self._handle_of(stream)
        self._commands.append(lambda places, current: launch(places, handle(current)))

    def copy(self, stream: str, dst: Address, src: Address, nbytes: int) -> None:
        (to, ahead), (source, behind) = dst, src
        handle, copy = self._handle_of(stream), self._direct.copy
        self._commands.append(
            lambda places, current: copy(
                places[to] + ahead, places[source] + behind, nbytes, handle(current)
            )
        )

    def copy_rows(
        self, stream: str, dst: Address, src: Address, extent: Sequence[int],
        pitches: Sequence[int],
    ) -> None:  # fmt: skip
        """Rows that do not lie one behind the other.

        Shapes  extent: rows, bytes of each; pitches: bytes from row to row, there and here
        """
        (to, ahead), (source, behind) = dst, src
        handle, copy = self._handle_of(stream), self._direct.copy_rows
        self._commands.append(
            lambda places, current: copy(
                places[to] + ahead, places[source] + behind, extent, pitches, handle(current)
            )
        )

    def take_token(self, stream: str, word: Address) -> None:
        place, distance = word
        handle, take_token = self._handle_of(stream), self._direct.take_token
        self._commands.append(
            lambda places, current: take_token(places[place] + distance, handle(current))
        )

    def wait(self, stream: str, other: str) -> None:
        """`stream` goes on behind what `other` has by then."""
        waiting, first = self._stream_of(stream), self._stream_of(other)
        self._commands.append(lambda _, current: waiting(current).wait(first(current)))

    def _stream_of(self, name: str) -> Callable[[Any], Any]:
        """Of the current stream, which is "main"."""
        if name == "main":
            return lambda current: current
        known = self._world.stream(name)
        return lambda _: known

    def _handle_of(self, name: str) -> Callable[[Any], int]:
        found = self._handles.get(name)
        if found is None:
            found = self._direct.handle
            if name != "main":
                known = found(self._world.stream(name))
                found = lambda _: known  # noqa: E731
            self._handles[name] = found
        return found
