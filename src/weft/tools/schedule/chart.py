"""The layout of a schedule: the lanes of each rank, what lies in them, its totals, its file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from weft.base.errors import UsageError
from weft.base.schedule import LINKS, PROGRAMS, Signal, Span, chrome_trace, lane_order
from weft.base.spans import intersection, total, union
from weft.tools import pictures

SMS = "SMs"
# What an SM is counted as, by the kind of what it does.
STATES = ("work", "wait")

# Each rank's totals, as words.
HEAD = ("rank", "ends at", "SM rows", "SMs work", "SMs wait", "data moves", "hidden")
HOW_TO_OPEN = "open it at https://ui.perfetto.dev"


@dataclass(frozen=True)
class Totals:
    """One rank's times in microseconds; `sms` is how many SMs have a row, or 1 where a kernel's
    programs have one together; `work` and `wait` are theirs added up; `hidden` is which part of the
    data's time on its way something was computed."""

    rank: int
    end_us: float
    sms: int
    work_us: float
    wait_us: float
    moved_us: float
    hidden: float

    def as_words(self) -> tuple[str, ...]:
        """Under HEAD."""
        whole = self.sms * self.end_us
        work, wait = (f"{us / whole:.0%}" if whole else "–" for us in (self.work_us, self.wait_us))
        hidden = f"{self.hidden:.0%}" if self.moved_us else "–"
        return (
            str(self.rank), f"{self.end_us:.1f} µs", str(self.sms), work, wait,
            f"{self.moved_us:.1f} µs", hidden,
        )  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """All of it; `signals` are those that ended a wait, `end_us` is when the last span ends.

    Spans of one lane do not lie on each other.
    """

    spans: tuple[Span, ...]
    signals: tuple[Signal, ...]
    totals: tuple[Totals, ...]
    end_us: float


def chart_of(spans: Iterable[Span], signals: Iterable[Signal] = ()) -> Chart:
    """Lay out what happened on all ranks, in the order of ranks and of engines.

    Time begins with the first span. Spans of one lane that lie on each other are put in lanes of
    their own.
    """
    given = sorted(spans, key=lambda s: (s.rank, lane_order(s.lane), s.start_us, -s.end_us, s.name))
    begin = min((span.start_us for span in given), default=0.0)
    given = [s._replace(start_us=s.start_us - begin, end_us=s.end_us - begin) for s in given]
    laid = [
        bar for _, own in groupby(given, key=lambda s: (s.rank, s.lane)) for bar in _packed(own)
    ]
    end_us = max((span.end_us for span in given), default=0.0)
    return Chart(tuple(laid), _ended_waits(given, signals, begin), tuple(_totals(given)), end_us)


def _packed(spans: Iterable[Span]) -> Iterator[Span]:
    """One lane's spans in as few lanes as may be without two on each other."""
    ends: list[float] = []
    for span in spans:
        number = next((i for i, end in enumerate(ends) if end <= span.start_us), len(ends))
        ends[number : number + 1] = [span.end_us]
        yield span if not number else span._replace(lane=f"{span.lane} ({number + 1})")


def engine_of(lane: str) -> str:
    """What a lane is a part of: all SMs of a rank, all that they move over links, or itself."""
    return SMS if lane.startswith("sm ") else LINKS if lane.startswith(LINKS) else lane


def _ended_waits(
    spans: Sequence[Span], signals: Iterable[Signal], begin: float
) -> tuple[Signal, ...]:
    """The signals at which somebody's wait ended: thousands of others would hide them."""
    ends = {(s.rank, s.lane, s.end_us) for s in spans if s.kind == "wait"}
    moved = [
        one._replace(sent_us=one.sent_us - begin, arrived_us=one.arrived_us - begin)
        for one in signals
    ]
    return tuple(s for s in moved if (s.rank, s.lane, s.arrived_us) in ends)


def _totals(spans: Sequence[Span]) -> Iterable[Totals]:
    for rank, own in groupby(spans, key=lambda span: span.rank):
        by_kind: dict[str, list[Span]] = defaultdict(list)
        for span in own:
            by_kind[span.kind].append(span)
        sms = {s.lane for kind in STATES for s in by_kind[kind]
               if s.lane.startswith("sm ") or s.lane == PROGRAMS}  # fmt: skip
        work = [s for s in by_kind["work"] if s.lane in sms]
        computed = union([(s.start_us, s.end_us) for s in [*work, *by_kind["torch"]]])
        moved = union([(s.start_us, s.end_us) for s in [*by_kind["copy"], *by_kind["transfer"]]])
        both = total(intersection(moved, computed))
        yield Totals(
            rank, max(s.end_us for group in by_kind.values() for s in group), len(sms),
            _by_lane(work), _by_lane([s for s in by_kind["wait"] if s.lane in sms]),
            total(moved), both / total(moved) if moved else 1.0,
        )  # fmt: skip


def _by_lane(spans: Sequence[Span]) -> float:
    """Each lane's time, added up: what two consumers of one program do at once counts once."""
    lanes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append((span.start_us, span.end_us))
    return sum(total(union(own)) for own in lanes.values())


def check_path(path: str, option: str) -> None:
    """Refuse a file that cannot be made, before the work. An empty path asks for none.

    Raises  UsageError: as pictures.check_path; an ending that is not .json
    """
    pictures.check_path(path, option)
    if path and not path.lower().endswith(".json"):
        raise UsageError(f"{option} {path}: it is a trace for Perfetto; name a file that ends in"
                         " .json")  # fmt: skip


def write(path: str, chart: Chart, title: str, notes: Sequence[str]) -> None:
    """The chart as a trace for Perfetto; `notes` say what was run, on what, and how the times came
    to be.

    Raises  UsageError: the file cannot be written
    """
    about = {"title": title, "notes": list(notes)}
    trace = {**chrome_trace(chart.spans, chart.signals), "otherData": about}
    pictures.save(path, json.dumps(trace) + "\n")
