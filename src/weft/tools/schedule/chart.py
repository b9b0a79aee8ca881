"""The layout of a schedule: which rows each rank has, what lies in them, who points at whom.

Pure data, no drawing. A rank has a row for each stream, copy engine and library, one for all that
its SMs move over links, and one for its SMs together, which opens into a row for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from weft.base.schedule import LINKS, PROGRAMS, Signal, Span, lane_order
from weft.base.spans import intersection, total, union, without

# More arrows than these are a cloud; those that ended a wait come first.
MAX_ARROWS = 600
# More bars than these in the rows of single SMs: neighbours of one kind are joined.
MAX_BARS = 40_000
# An area has at most so many steps.
MAX_STEPS = 1_500

SMS = "SMs"
# What an SM is counted as, by the kind of what it does; the innermost span counts.
STATES = ("work", "program", "wait")
# Of these it is shown whose data they are about.
COLOURED = ("work", "transfer")


@dataclass(frozen=True)
class Lane:
    """One line of bars that do not lie on each other, but for those that a program holds."""

    title: str
    bars: tuple[Span, ...]


# A kind of span, and the rank whose data it is about.
State = tuple[str, int]


@dataclass(frozen=True)
class Steps:
    """How many lanes are in each state, from `times[i]` until `times[i + 1]`; bottom up."""

    times: tuple[float, ...]
    counts: tuple[tuple[float, ...], ...]
    states: tuple[State, ...]
    most: int


@dataclass(frozen=True)
class Row:
    """A row of one rank: bars of one lane, or an area that opens into `lanes`."""

    rank: int
    title: str
    lanes: tuple[Lane, ...]
    area: Steps | None = None


@dataclass(frozen=True)
class Arrow:
    """A signal, between rows by number; the lanes count within a row that opens.

    `ended_wait`: somebody stood still until it came.
    """

    name: str
    start_row: int
    start_lane: int
    start_us: float
    end_row: int
    end_lane: int
    end_us: float
    ended_wait: bool


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


@dataclass(frozen=True)
class Chart:
    """All of it; `end_us` is when the last span ends."""

    rows: tuple[Row, ...]
    arrows: tuple[Arrow, ...]
    totals: tuple[Totals, ...]
    end_us: float
    more_arrows: int = 0


def chart_of(spans: Iterable[Span], signals: Iterable[Signal] = ()) -> Chart:
    """Lay out what happened on all ranks, in the order of ranks and of engines.

    Time begins with the first span. Spans of one lane that lie on each other, though neither is
    the program of the other, are put in lanes of their own.
    """
    given = sorted(spans, key=lambda s: (s.rank, lane_order(s.lane), s.start_us, -s.end_us, s.name))
    begin = min((span.start_us for span in given), default=0.0)
    given = [s._replace(start_us=s.start_us - begin, end_us=s.end_us - begin) for s in given]
    rows: list[Row] = []
    at: dict[tuple[int, str], tuple[int, int]] = {}
    for rank, own in groupby(given, key=lambda span: span.rank):
        for title, lanes in _rows(list(own)).items():
            for number, lane in enumerate(lanes):
                at[rank, lane.title] = (len(rows), number)
            is_area = title in (SMS, LINKS)
            area = _area(lanes, ("transfer",) if title == LINKS else STATES, rank)
            rows.append(Row(rank, title, _fewer(lanes), area if is_area else None))
    arrows = _arrows(given, [_moved(signal, begin) for signal in signals], at)
    return Chart(
        tuple(rows), tuple(arrows[:MAX_ARROWS]), tuple(_totals(given)),
        max((span.end_us for span in given), default=0.0), max(0, len(arrows) - MAX_ARROWS),
    )  # fmt: skip


def _moved(signal: Signal, begin: float) -> Signal:
    return signal._replace(sent_us=signal.sent_us - begin, arrived_us=signal.arrived_us - begin)


def _rows(own: Sequence[Span]) -> dict[str, list[Lane]]:
    """One rank's lanes by the row that they are in."""
    rows: dict[str, list[Lane]] = {}
    for lane, spans in groupby(own, key=lambda span: span.lane):
        for number, bars in enumerate(_packed(list(spans))):
            title = lane if not number else f"{lane} ({number + 1})"
            row = SMS if lane.startswith("sm ") else lane if lane == LINKS else title
            rows.setdefault(row, []).append(Lane(title, bars))
    return rows


def _packed(spans: Sequence[Span]) -> list[tuple[Span, ...]]:
    """As few lanes as may be without two bars on each other; what a program holds stays in it."""
    lanes: list[list[Span]] = []
    outer: list[Span] = []
    for span in spans:
        for bars, last in zip(lanes, outer):
            inside = last.kind == "program" and span.end_us <= last.end_us
            if span.start_us >= last.end_us or inside:
                bars.append(span)
                if not inside:
                    outer[lanes.index(bars)] = span
                break
        else:
            lanes.append([span])
            outer.append(span)
    return [tuple(bars) for bars in lanes]


def _fewer(lanes: Sequence[Lane]) -> tuple[Lane, ...]:
    """The same, bars of one kind and of one rank's data joined where there are too many."""
    if sum(len(lane.bars) for lane in lanes) <= MAX_BARS:
        return tuple(lanes)
    return tuple(Lane(lane.title, tuple(_joined(lane.bars))) for lane in lanes)


def _joined(bars: Sequence[Span]) -> Iterable[Span]:
    for _, alike in groupby(bars, key=lambda bar: (bar.kind, bar.about)):
        first, *others = alike
        if not others:
            yield first
        else:
            name = f"{first.name} … {others[-1].name}, {len(others) + 1} of them"
            end = max(bar.end_us for bar in (first, *others))
            yield first._replace(name=name, end_us=end)


def _area(lanes: Sequence[Lane], kinds: tuple[str, ...], rank: int) -> Steps:
    """How many lanes are in which state over time; the innermost span of a lane says it.

    Bottom up: what is computed, from own data on; then the rest of `kinds`.
    """
    bars = [bar for lane in lanes for bar in lane.bars if bar.kind in kinds]
    there = {(bar.kind, bar.about if bar.kind in COLOURED else -1) for bar in bars}
    num_ranks = 1 + max((about for _, about in there), default=0)
    inner = ("work", "transfer", "wait")

    def height(state: State) -> tuple[int, int]:
        kind, about = state
        return kinds.index(kind), (about - rank) % num_ranks if about >= 0 else -1

    states = sorted(there, key=height)
    changes: dict[float, list[float]] = defaultdict(lambda: [0.0] * len(states))
    for lane in lanes:
        covered: list[tuple[float, float]] = []
        for state in sorted(states, key=lambda one: one[0] not in inner):
            spans = [
                (bar.start_us, bar.end_us) for bar in lane.bars
                if (bar.kind, bar.about if bar.kind in COLOURED else -1) == state
            ]  # fmt: skip
            for start, end in (part for one in union(spans) for part in without(one, covered)):
                changes[start][states.index(state)] += 1
                changes[end][states.index(state)] -= 1
            covered = union([*covered, *spans])
    times = sorted(changes)
    counts, now = [], [0.0] * len(states)
    for time in times:
        now = [a + b for a, b in zip(now, changes[time])]
        counts.append(tuple(now))
    return _coarser(Steps(tuple(times), tuple(counts), tuple(states), len(lanes)))


def _coarser(steps: Steps) -> Steps:
    """The means of MAX_STEPS equal lengths where there are more steps than that."""
    if len(steps.times) <= MAX_STEPS:
        return steps
    first, last = steps.times[0], steps.times[-1]
    width = (last - first) / MAX_STEPS
    sums = [[0.0] * len(steps.states) for _ in range(MAX_STEPS)]
    for i, counts in enumerate(steps.counts[:-1]):
        start, end = steps.times[i], steps.times[i + 1]
        at = min(int((start - first) / width), MAX_STEPS - 1)
        while start < end and at < MAX_STEPS:
            until = min(end, first + (at + 1) * width) if at < MAX_STEPS - 1 else end
            for state, count in enumerate(counts):
                sums[at][state] += count * (until - start) / width
            start, at = until, at + 1
    times = [first + i * width for i in range(MAX_STEPS)]
    nothing = (0.0,) * len(steps.states)
    return Steps((*times, last), (*[tuple(one) for one in sums], nothing), steps.states, steps.most)


def _arrows(
    spans: Sequence[Span], signals: Iterable[Signal], at: dict[tuple[int, str], tuple[int, int]]
) -> list[Arrow]:
    """One arrow for each signal and receiver; those first that ended a wait, then the longest."""
    ends = {(s.rank, s.lane, s.end_us) for s in spans if s.kind == "wait"}
    found: dict[tuple, Arrow] = {}
    for signal in signals:
        start = at.get((signal.source_rank, signal.source_lane))
        end = at.get((signal.rank, signal.lane))
        if start is None or end is None:
            continue
        ended = (signal.rank, signal.lane, signal.arrived_us) in ends
        arrow = Arrow(signal.name, *start, signal.sent_us, *end, signal.arrived_us, ended)
        # Many programs see one signal: the row gets one arrow, to the first that it held up.
        key = (signal.name, *start, signal.sent_us, end[0], signal.arrived_us)
        if key not in found or (ended and not found[key].ended_wait):
            found[key] = arrow
    return sorted(found.values(), key=lambda a: (not a.ended_wait, a.start_us - a.end_us))


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
            sum(s.end_us - s.start_us for s in work),
            sum(s.end_us - s.start_us for s in by_kind["wait"] if s.lane in sms),
            total(moved), both / total(moved) if moved else 1.0,
        )  # fmt: skip
