"""Stages of a model over ranks: which pass of which microbatch comes when, and what that takes.

    stage s = chunk * num_ranks + rank      one stage to a rank, or several (interleaved), in turns
    forward of microbatch i   ->  its result to stage s + 1, on the rank behind, around
    backward of microbatch i  ->  its gradient to stage s - 1, on the rank before

A rank does some forwards at first, then one forward and one backward in turns (1F1B), then the
backwards that are left. With one stage each it begins with as many as there are ranks behind it, so
it keeps the activations of no more microbatches than that and one. With several it goes through its
chunks, num_ranks microbatches of one after as many of the next, and begins with
2 * (ranks behind) + (chunks - 1) * num_ranks of them. Backwards come in the same order, the last
chunk first, so each stage's gradients are added in the order of microbatches.

No rank waits for one that waits for it. All ranks go through stages in one order, so what a rank
sends to another, forwards and backwards apart, comes in the order in which that one needs it. And
there is a clock for all: let each pass take one tick, and begin when what it needs has been made
and the rank's pass before is over. On this clock each receive is behind its send. Each send is
behind the receive of the message that lay in its box last, even with one box between two ranks. So
in the order of ticks all can be done one by one, and waits make no circle. `Stages.played` finds
out that the clock never stops; a test asks it for all small numbers of ranks, chunks and
microbatches. Interleaved, it stops for some numbers of microbatches that num_ranks does not divide:
these are refused.

Source  PipeDream-flush (Narayanan et al. 2021, 2006.09503); 1F1B, interleaved, as in Megatron-LM
        (Narayanan et al. 2021, 2104.04473), section 2.2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from weft.base.errors import UsageError
from weft.base.schedule import Schedule, Signal, Span
from weft.base.whole_numbers import whole_number

FORWARD, BACKWARD = "forward", "backward"
# Streams of a rank: of passes, of what comes, of what goes.
PASSES, RECEIVES, SENDS = "main", "pipeline receives", "pipeline sends"


class Turn(NamedTuple):
    """One thing that a rank does: a pass of one microbatch through one of its stages."""

    what: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.what} {self.microbatch} of chunk {self.chunk}"


class Times(NamedTuple):
    """In microseconds: a pass through one stage, and a message to the next."""

    forward_us: float = 1.0
    backward_us: float = 2.0
    message_us: float = 0.0


@dataclass(frozen=True)
class Stages:
    """num_ranks * chunks stages, through which `microbatches` pass in a step."""

    num_ranks: int
    microbatches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("num_ranks", "microbatches", "chunks"):
            whole_number(f"Pipeline: {name}", getattr(self, name), 1, UsageError)
        if self.chunks > 1 and self.microbatches % self.num_ranks:
            raise UsageError(
                f"Pipeline: {self.microbatches} microbatches over {self.num_ranks} ranks of "
                f"{self.chunks} stages each; interleaved stages take them {self.num_ranks} at a "
                f"time: pass a multiple of {self.num_ranks}, or one stage to a rank"
            )

    @property
    def bubble(self) -> float:
        """Which part of a step a rank waits, where all stages take the same time and messages
        none."""
        behind = self.num_ranks - 1
        return behind / (self.chunks * self.microbatches + behind)

    def turns(self, rank: int) -> Iterator[Turn]:
        """What a rank does, in order."""
        forwards, backwards = list(self._through(FORWARD)), list(self._through(BACKWARD))
        behind = self.num_ranks - 1 - rank
        first = behind if self.chunks == 1 else 2 * behind + (self.chunks - 1) * self.num_ranks
        first = min(first, len(forwards))
        yield from forwards[:first]
        for forward, backward in zip(forwards[first:], backwards, strict=False):
            yield forward
            yield backward
        yield from backwards[len(forwards) - first :]

    def _through(self, what: str) -> Iterator[Turn]:
        """All passes of a kind through a rank's stages."""
        for begin in range(0, self.microbatches, self.num_ranks):
            for chunk in range(self.chunks):
                for i in range(begin, min(begin + self.num_ranks, self.microbatches)):
                    yield Turn(what, i, chunk if what == FORWARD else self.chunks - 1 - chunk)

    def source(self, rank: int, turn: Turn) -> int | None:
        """The rank that makes what the turn begins with; None where that is an input, or a loss."""
        return self._beside(rank, turn, -1 if turn.what == FORWARD else 1)

    def target(self, rank: int, turn: Turn) -> int | None:
        """The rank that needs what the turn makes; None where that is a loss, or nobody."""
        return self._beside(rank, turn, 1 if turn.what == FORWARD else -1)

    def _beside(self, rank: int, turn: Turn, step: int) -> int | None:
        stage = turn.chunk * self.num_ranks + rank + step
        return stage % self.num_ranks if 0 <= stage < self.num_ranks * self.chunks else None

    def played(self, times: Times = Times(), boxes: int = 2) -> Schedule:
        """Who does what when, as weft.layers.Pipeline queues it: a rank's messages travel beside
        its passes, one at a time each way; a pass waits for its message, and its result for the one
        before to be away; a message waits for one of `boxes` between two ranks.

        Raises  UsageError: ranks that wait for each other, with what they wait for
        """
        ranks = [_Rank(self, rank, times, boxes) for rank in range(self.num_ranks)]
        lines: dict[tuple[str, int, int], _Line] = defaultdict(_Line)
        done = -1
        while done < (done := sum(one.go_on(lines) for one in ranks)):
            pass
        if waiting := [str(one) for one in ranks if not one.is_done]:
            raise UsageError(f"Pipeline: ranks wait for each other: {'; '.join(waiting)}")
        spans = [span for one in ranks for span in one.spans]
        return Schedule(spans, [signal for one in ranks for signal in one.signals])

    def waits(self, schedule: Schedule) -> float:
        """Which part of all ranks' time until the last is done is in no pass."""
        passes = sum(s.end_us - s.start_us for s in schedule.spans if s.kind == "work")
        return 1 - passes / (self.num_ranks * schedule.end_us)


class _Line:
    """Messages of one kind from one rank to another: when they were there, and out of their box."""

    def __init__(self) -> None:
        self.sent_us: list[float] = []
        self.arrived_us: list[float] = []
        self.taken_us: list[float] = []


class _Rank:
    """How far a rank has come; what it does next waits, in this order, for a message, then for a
    box. That is more than the streams ask: they would receive before an earlier send is through."""

    def __init__(self, stages: Stages, rank: int, times: Times, boxes: int) -> None:
        self.stages, self.rank, self.times, self.boxes = stages, rank, times, boxes
        self.turns = list(stages.turns(rank))
        self.at, self.is_passed = 0, False
        self.spans: list[Span] = []
        self.signals: list[Signal] = []
        # When each stream is through with what it was given, and when the last pass began.
        self.free = {PASSES: 0.0, RECEIVES: 0.0, SENDS: 0.0}
        self.began_us = 0.0

    @property
    def is_done(self) -> bool:
        return self.at == len(self.turns)

    def __str__(self) -> str:
        what = "its message" if not self.is_passed else "a box"
        return f"rank {self.rank}, {self.turns[self.at]}, waits for {what}"

    def go_on(self, lines: dict[tuple[str, int, int], _Line]) -> int:
        """As far as it can; how many things it has done by now."""
        while not self.is_done:
            turn = self.turns[self.at]
            step = self._send if self.is_passed else self._pass
            if not step(turn, lines):
                break
            self.at, self.is_passed = self.at + self.is_passed, not self.is_passed
        return 2 * self.at + self.is_passed

    def _pass(self, turn: Turn, lines: dict[tuple[str, int, int], _Line]) -> bool:
        src, free, begin = self.stages.source(self.rank, turn), self.free, self.free[PASSES]
        if src is not None and src != self.rank:
            line = lines[turn.what, src, self.rank]
            if len(line.arrived_us) == len(line.taken_us):
                return False
            which = len(line.taken_us)
            arrived = line.arrived_us[which]
            taken = max(arrived, free[RECEIVES], self.began_us)
            line.taken_us.append(taken)
            free[RECEIVES] = taken
            if taken > begin:
                self._span(PASSES, f"wait for {turn}", begin, taken, "wait", src)
                begin = taken
            self.signals.append(
                Signal(
                    str(turn),
                    src,
                    f"stream {SENDS}",
                    line.sent_us[which],
                    self.rank,
                    f"stream {PASSES}",
                    taken,
                )
            )
        takes = self.times.forward_us if turn.what == FORWARD else self.times.backward_us
        self._span(PASSES, str(turn), begin, begin + takes, "work", self.rank)
        self.began_us, free[PASSES] = begin, begin + takes
        return True

    def _send(self, turn: Turn, lines: dict[tuple[str, int, int], _Line]) -> bool:
        dst, free = self.stages.target(self.rank, turn), self.free
        if dst is None or dst == self.rank:
            return True
        line = lines[turn.what, self.rank, dst]
        before = len(line.arrived_us) - self.boxes
        if before >= len(line.taken_us):
            return False
        begin = max(free[PASSES], free[SENDS])
        free[PASSES] = begin
        begin = max(begin, line.taken_us[before] if before >= 0 else 0.0)
        free[SENDS] = begin + self.times.message_us
        self._span(SENDS, str(turn), begin, free[SENDS], "copy", self.rank)
        line.sent_us.append(begin)
        line.arrived_us.append(free[SENDS])
        return True

    def _span(self, on: str, name: str, begin: float, end: float, kind: str, about: int) -> None:
        if end > begin:
            lane = f"stream {on}"
            self.spans.append(Span(self.rank, lane, name, begin, end, kind, about))


def bubble(num_ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Which part of a step a rank waits: see `Stages.bubble`."""
    return Stages(num_ranks, microbatches, chunks).bubble
