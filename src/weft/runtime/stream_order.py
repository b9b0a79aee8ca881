"""Calls of one rank that share memory, on streams that nothing else orders.

Operators of a world share mailboxes, slots and helper streams. Calls on one stream follow each
other; a call on another stream waits for what the stream of the last call holds, as NCCL orders
the calls of one communicator. While all calls are on one stream this costs a comparison.

What is recorded waits for what is recorded with it, and for nothing else: a recording cannot know
what runs when it is replayed. `OrderedRecording.replay` is a call itself, on the stream that it is
called on.

    with side: all_reduce(x, world=world)       |  side: ... all_reduce
    all_reduce(y, world=world)                  |  main: ... event of side, all_reduce

Limits  CUDA graphs that the user has made by torch are replayed unseen: order their replays and
        calls on other streams by torch.cuda.Stream.wait_stream
        A stream waits for all that the other one holds, which has to exist still
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.runtime.backend import Backend, Recording, Stream


class StreamOrder:
    """The order of calls that share something; `take` begins each of them."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._current_number = backend.stream_number
        # The stream of the last call; None where it must be looked at more closely.
        self._number: int | None = None
        self._last: Stream | None = None
        self._recorded: Stream | None = None

    @property
    def is_recorded(self) -> bool:
        """Was a call recorded since the last `begin_recording`?"""
        return self._recorded is not None

    def begin_recording(self) -> None:
        self._number = self._recorded = None

    def take(self) -> None:
        """The current stream's later work comes after the calls so far."""
        number = self._current_number()
        if number != self._number:
            self._change(number)

    def _change(self, number: int) -> None:
        current = self._backend.current_stream()
        if self._backend.is_recording():
            # Either may be a part of this recording, or lie outside of it.
            before = (self._last, self._recorded)
            self._number, self._recorded = None, current
        else:
            before = (self._last,)
            self._number, self._last = number, current
        for stream in before:
            if stream is not None and stream is not current:
                self._backend.wait_for(stream)


class OrderedRecording:
    """A recording whose replays are calls, in the order of all that it holds calls of."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._orders: list[StreamOrder] = []

    def end(self, orders: Iterable[StreamOrder]) -> None:
        """Of all orders there are, keep those that it holds calls of."""
        self._orders = [order for order in orders if order.is_recorded]

    def replay(self) -> None:
        """Enqueue all of it again on the current stream, behind calls on other streams."""
        for order in self._orders:
            order.take()
        self.recording.replay()
