"""What a run would have looked like in time: spans, a summary per rank, and a trace to look at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.base.schedule import Signal, Span, chrome_trace
from weft.base.spans import intersection, total, union


@dataclass(frozen=True)
class Summary:
    """One rank's time.

    Units   overlap: which part of the transfers' time was also computation's; 1 where nothing
            was transferred
    """

    rank: int
    makespan_us: float
    compute_us: float
    copy_us: float
    overlap: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.makespan_us:.1f} us; computes {self.compute_us:.1f}, "
            f"transfers {self.copy_us:.1f}, would overlap {self.overlap:.0%} of that"
        )


class Timeline(Sequence[Span]):
    """The spans of a run, in order of their start, whoever holds others before them.

    `signals` are those that a program or a stream waited for, in vain or not, by their arrival.
    """

    def __init__(
        self,
        num_ranks: int,
        spans: Sequence[Span],
        compute: Sequence[Sequence[tuple[float, float]]],
        transfers: Sequence[Sequence[tuple[float, float]]],
        signals: Sequence[Signal] = (),
    ) -> None:
        self.num_ranks = num_ranks
        self._spans = sorted(spans, key=lambda s: (s.start_us, s.rank, s.lane, -s.end_us, s.name))
        self.signals = sorted(signals, key=lambda s: (s.arrived_us, s.rank, s.lane, s.name))
        self._compute = [union(spans) for spans in compute]
        self._transfers = [union(spans) for spans in transfers]

    def __getitem__(self, index):
        return self._spans[index]

    def __len__(self) -> int:
        return len(self._spans)

    def __repr__(self) -> str:
        return f"Timeline({len(self)} spans, {self.makespan_us:.1f} us)"

    @property
    def makespan_us(self) -> float:
        """From the first start to the last end, over all ranks."""
        if not self._spans:
            return 0.0
        return max(span.end_us for span in self._spans) - self._spans[0].start_us

    def on(self, rank: int, lane: str = "") -> list[Span]:
        """The spans of one rank, or of those of its lanes that begin with `lane`."""
        return [span for span in self if span.rank == rank and span.lane.startswith(lane)]

    def summary(self) -> list[Summary]:
        """One line for each rank."""
        found = []
        for rank in range(self.num_ranks):
            own = self.on(rank)
            makespan = max((s.end_us for s in own), default=0.0) - min(
                (s.start_us for s in own), default=0.0
            )
            compute, transfers = self._compute[rank], self._transfers[rank]
            moved = total(transfers)
            hidden = total(intersection(compute, transfers)) / moved if moved else 1.0
            found.append(Summary(rank, makespan, total(compute), moved, hidden))
        return found

    def to_chrome(self) -> dict:
        """The trace as Chrome and Perfetto read it: a process per rank, a thread per lane."""
        return chrome_trace(self, self.held_up())

    def held_up(self) -> list[Signal]:
        """The signals at which a wait ended, rather than found them there."""
        ends = {(s.rank, s.lane, s.end_us) for s in self if s.kind == "wait"}
        return [s for s in self.signals if (s.rank, s.lane, s.arrived_us) in ends]

    def write(self, path: str | Path) -> None:
        """The trace as a file for https://ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(self.to_chrome()) + "\n")
