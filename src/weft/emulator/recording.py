"""Recording and replay of a rank's device work, as a CUDA graph would.

Nothing runs while a recording is made. It keeps how to make each piece of work again, with its
arguments frozen, and each replay queues all of it behind the stream that replays.

What an operator's call launches is recorded as well, once the call has come again
(runtime/replays.py). Such a recording is one of addresses, as a CUDA graph is: it keeps no tensor
alive, and takes whatever lies at its addresses when it is replayed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.base.errors import UsageError
from weft.base.place import Place
from weft.base.user_place import user_place
from weft.emulator.actors import Actor, address_of, span_of, tensors_in
from weft.emulator.context import Kept, MakeWork, RankContext
from weft.emulator.device import Stream, Work
from weft.emulator.works import Event, EventRecord, EventWait


@dataclass
class _Branch:
    """One recorded stream: how much it holds, and how much of every branch it is ordered after."""

    length: int = 0
    knows: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedMark:
    """A point in a recorded stream: the number of its event, and how much was known there."""

    recording: Recording
    number: int
    known: dict[str, int]


class Recording:
    """The frozen work of one pair of brackets."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        context.num_recordings += 1
        self.number = context.num_recordings
        self.root = context.stream.name
        self.place = user_place()
        # The stream of each work, and how to make it with the events of a replay.
        self.steps: list[tuple[str, Callable[[dict[int, Event]], Work]]] = []
        self.branches: dict[str, _Branch] = {self.root: _Branch()}
        self.finished = False
        self.results: list[Any] = []

    def __enter__(self) -> Recording:
        if self.context.recording is not None:
            raise UsageError(
                "a recording is under way already; recordings do not nest", place=user_place()
            )
        self.context.recording = self
        return self

    def __exit__(self, kind: type | None, *failure: Any) -> None:
        self.context.recording = None
        self.finished = kind is None
        if kind is None:
            self._check_joined()

    def add(self, stream: Stream, make: MakeWork) -> None:
        """Remember one piece of work of `stream`."""
        branch = self._branch(stream)
        branch.length += 1
        branch.knows[stream.name] = branch.length
        self.steps.append((stream.name, lambda events: make()))

    def holds(self, stream: Stream) -> bool:
        """Is the stream a part of this recording so far?"""
        return stream.name in self.branches

    def check_holds(self, earlier: Stream, later: Stream) -> None:
        if not self.holds(earlier):
            raise UsageError(
                f"stream {later.name!r} waits for stream {earlier.name!r}, which holds nothing "
                "of this recording; let it wait for the recording's own stream first",
                place=user_place(),
            )

    def mark(self, stream: Stream) -> RecordedMark:
        """What `stream` holds now."""
        place, number = user_place(), len(self.steps)
        known = dict(self._branch(stream).knows)
        self.steps.append((stream.name, lambda events: EventRecord(events[number], place=place)))
        return RecordedMark(self, number, known)

    def follow(self, later: Stream, mark: Any) -> None:
        """Work recorded on `later` from here on starts after what was marked."""
        if not isinstance(mark, RecordedMark) or mark.recording is not self:
            raise UsageError(
                f"stream {later.name!r} waits for an event that is not of this recording",
                place=user_place(),
            )
        target = self.branches.setdefault(later.name, _Branch())
        for name, length in mark.known.items():
            target.knows[name] = max(target.knows.get(name, 0), length)
        place, number = user_place(), mark.number
        self.steps.append((later.name, lambda events: EventWait(events[number], place=place)))

    def _branch(self, stream: Stream) -> _Branch:
        branch = self.branches.get(stream.name)
        if branch is None:
            raise UsageError(
                f"work on stream {stream.name!r} is not part of the recording on stream "
                f"{self.root!r}: nothing orders it; call stream.wait(...) on it first",
                place=user_place(),
            )
        return branch

    def _check_joined(self) -> None:
        known = self.branches[self.root].knows
        for name, branch in self.branches.items():
            if branch.length > known.get(name, 0):
                raise UsageError(
                    f"the recording ends with work on stream {name!r} that stream {self.root!r} "
                    f"has not waited for; call wait({name!r}'s stream) before the end",
                    place=self.place,
                )

    def keeping(self, tensors: Sequence[torch.Tensor]) -> Kept:
        """What a piece of recorded work keeps alive, each time that it is made."""
        return lambda: tensors

    def placed(self, work: Work) -> Work:
        """`work` of a replay, with the host's lines that it is queued by."""
        return work

    def replay(self) -> None:
        """Queue all of it behind the current stream's work; the host does not wait."""
        context = self.context
        if not self.finished:
            raise UsageError("replay() before the recording has ended", place=user_place())
        if context.recording is not None:
            raise UsageError("replay() within a recording", place=user_place())
        streams = {
            # The other branches of a graph run on streams of its own.
            name: context.device.stream(context.rank, f"{name} of recording {self.number}")
            for name in self.branches
            if name != self.root
        }
        streams[self.root] = context.stream
        events: dict[int, Event] = defaultdict(Event)
        for name, make in self.steps:
            streams[name].enqueue(self.placed(make(events)))


class LaunchRecording(Recording):
    """What one call queues, for calls to come.

    A replay is a call of its own: its findings name that call's lines, not those of the call that
    was recorded.
    """

    # Copies, too, take whatever lies at their addresses.
    is_current = True
    device_bytes = 0

    @classmethod
    def of(cls, context: RankContext, launch: Callable[[], None]) -> LaunchRecording:
        """Of what `launch` queues. Here, since lines of callers are a part of a work's place."""
        with cls(context) as recording:
            launch()
        return recording

    def keeping(self, tensors: Sequence[torch.Tensor]) -> Kept:
        memory = self.context.memory
        names: dict[int, str] = {}
        for tensor in tensors:
            known = memory.find(address := address_of(tensor))
            if known is not None:
                names[address] = known.name
        return lambda: [self.context.found(address, name) for address, name in names.items()]

    def placed(self, work: Work) -> Work:
        before, frames = self.place.frames, work.place.frames
        if frames[: len(before)] == before:
            work.place = Place(self._now.frames + frames[len(before) :])
        return work

    def replay(self) -> None:
        self._now = user_place()
        super().replay()


def frozen_operation(
    context: RankContext, report_accesses: Callable, func: Any, manner: Any, args: tuple,
    kwargs: dict,
) -> tuple[Any, MakeWork]:  # fmt: skip
    """A torch operation that does not run now: (its result, how to make work that runs it).

    The result's tensors have their shape and memory, and get their values when the work runs.
    """
    place = user_place()
    if manner.writes:
        outputs = _written(manner, args, kwargs)
        result: Any = outputs[0] if len(outputs) == 1 else tuple(outputs)
    else:
        result = func(*args, **kwargs)  # for shapes and memory; the values mean nothing yet
        outputs = list(tensors_in(result))
        for tensor in outputs:
            context.track(tensor, "result", initialised=False)
    for tensor in tensors_in((args, tuple(kwargs.values()))):
        context.track(tensor, "operand")

    def run(actor: Any) -> None:
        report_accesses(func, manner, args, kwargs, actor)
        again = func(*args, **kwargs)
        if not manner.writes:
            for tensor, value in zip(outputs, tensors_in(again), strict=True):
                actor.access([span_of(tensor)], True)
                tensor.copy_(value)

    return result, lambda: TorchWork(run, place, keep=(args, kwargs, outputs))


class TorchWork(Work):
    """A recorded torch operation in its stream's order."""

    kind = "torch operation"

    def __init__(self, call: Callable[[Any], None], place: Place, keep: Any) -> None:
        super().__init__(place, keep)
        self.call = call

    def start(self) -> None:
        with torch.no_grad():
            self.call(Actor.of_work(self, "torch"))
        self.stream.finished(self)


def _written(manner: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    named = [*zip(manner.names, args, strict=False), *kwargs.items()]
    return [value for name, value in named if name in manner.writes]
