"""A schedule in time as plain records: what each rank's engines do when, and what waits for what.

The compiler's cost model gives them of a plan, the trace of its tiles of a run on GPUs; what draws
them (`weft timeline`) or writes them down (`weft trace`) need not know which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Lanes: what a rank's SMs move over links; a kernel's programs together, where a plan is predicted.
LINKS, PROGRAMS = "transfers of SMs", "programs"


class Span(NamedTuple):
    """Something that one rank did, in microseconds from the start.

    Kinds   kernel: a launch, from its first program to its last; work: a program loads, multiplies
            and stores; wait; copy: of a copy engine; signal: its word behind the data; transfer:
            programs move bytes over a link; torch: an operation of a library
    Lanes   "stream NAME", "copy engine N", "torch", "transfers of SMs", "sm N"
    Ranks   about: the rank whose data it is, -1 where that is nobody's
    """

    rank: int
    lane: str
    name: str
    start_us: float
    end_us: float
    kind: str = "work"
    about: int = -1


class Signal(NamedTuple):
    """From who sent it to who waited for it; `arrived_us` is when the waiter could see it.

    It held the waiter up where its wait ends then, and began before.
    """

    name: str
    source_rank: int
    source_lane: str
    sent_us: float
    rank: int
    lane: str
    arrived_us: float


@dataclass(frozen=True)
class Schedule:
    """Who does what when; `end_us` is when the last rank is done."""

    spans: Sequence[Span]
    signals: Sequence[Signal]

    @property
    def end_us(self) -> float:
        return max((span.end_us for span in self.spans), default=0.0)


def chrome_trace(spans: Iterable[Span], signals: Iterable[Signal] = ()) -> dict[str, Any]:
    """The schedule as Chrome and Perfetto read it: a process for each rank, a thread for each lane,
    an arrow for each signal.

    Units   times in the file are microseconds
    """
    spans = list(spans)
    lanes: dict[int, dict[str, int]] = defaultdict(dict)
    there = {(span.rank, span.lane) for span in spans}
    for rank, lane in sorted(there, key=lambda one: (one[0], lane_order(one[1]))):
        lanes[rank][lane] = len(lanes[rank])
    events: list[dict[str, Any]] = []
    for rank, of_rank in lanes.items():
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        for lane, number in of_rank.items():
            events.append(_named("thread_name", rank, number, lane))
            events.append(
                {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": number,
                 "args": {"sort_index": number}}
            )  # fmt: skip
    for span in spans:
        events.append(
            {"name": span.name, "cat": span.kind, "ph": "X", "pid": span.rank,
             "tid": lanes[span.rank][span.lane], "ts": round(span.start_us, 4),
             "dur": round(span.end_us - span.start_us, 4)}
        )  # fmt: skip
    for number, signal in enumerate(signals):
        ends = (
            ("s", signal.source_rank, signal.source_lane, signal.sent_us),
            ("f", signal.rank, signal.lane, signal.arrived_us),
        )
        for phase, rank, lane, time in ends:
            if lane in lanes[rank]:
                events.append(
                    {"name": signal.name, "cat": "signal", "ph": phase, "id": number,
                     "pid": rank, "tid": lanes[rank][lane], "ts": round(time, 4), "bp": "e"}
                )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _named(what: str, rank: int, number: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": number, "args": {"name": name}}


def lane_order(lane: str) -> tuple[int, int, str]:
    """As a rank's lanes follow each other: streams, the main one first, copies, torch, transfers,
    SMs by number."""
    kind, _, number = lane.rpartition(" ")
    first = {"copy engine": 1, "": 2, "transfers of": 3, "sm": 4}.get(kind, 0)
    return first, int(number) if number.isdigit() else lane != "stream main", lane
