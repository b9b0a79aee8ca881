"""The schedule of a model in stages: the passes of all ranks, and which part of the time they wait.

It is of no plan: a pass takes what its user says, a message what the machine's copy engine takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from weft.base.errors import UsageError
from weft.base.hardware import Hardware
from weft.base.schedule import Schedule
from weft.base.whole_numbers import whole_number
from weft.layers.stages import Stages, Times

# What it is called among operators, and its sizes: times are of all stages of a rank.
NAME = "pipeline"
SIZES = {
    "microbatches": 8, "chunks": 1, "forward_us": 1000, "backward_us": 2000, "bytes": 0,
}  # fmt: skip
HEAD = ("rank", "ends at", "passes", "waits", "sends")
PLAYED = (
    "The order of passes of weft.layers.Pipeline, with passes of {forward:g} and {backward:g} µs"
    " and messages of {message:.1f} µs ({hw}), before anything runs."
)


@dataclass(frozen=True)
class Totals:
    """One rank's times in microseconds; `waits` is its part of the whole without a pass."""

    rank: int
    end_us: float
    passes_us: float
    waits: float
    sends_us: float

    def as_words(self) -> tuple[str, ...]:
        """Under HEAD."""
        return (
            str(self.rank), f"{self.end_us:.1f} µs", f"{self.passes_us:.1f} µs",
            f"{self.waits:.1%}", f"{self.sends_us:.1f} µs",
        )  # fmt: skip


@dataclass(frozen=True)
class Piped:
    """A step of a pipeline, in time."""

    stages: Stages
    times: Times
    schedule: Schedule
    hw: str

    @property
    def totals(self) -> list[Totals]:
        end_us = self.schedule.end_us
        return [self._of(rank, end_us) for rank in range(self.stages.num_ranks)]

    def _of(self, rank: int, end_us: float) -> Totals:
        own = [one for one in self.schedule.spans if one.rank == rank]
        took = {kind: sum(s.end_us - s.start_us for s in own if s.kind == kind)
                for kind in ("work", "copy")}  # fmt: skip
        ends = max(one.end_us for one in own)
        return Totals(rank, ends, took["work"], 1 - took["work"] / end_us, took["copy"])

    @property
    def bubble(self) -> str:
        """In words: the part that ranks wait, and what it is where messages take no time."""
        waits, least = self.stages.waits(self.schedule), self.stages.bubble
        return (
            f"bubble: ranks wait {waits:.1%} of the time, {least:.1%} where stages are alike and "
            "messages take none: (ranks - 1) / (chunks * microbatches + ranks - 1)"
        )

    @property
    def note(self) -> str:
        forward, backward, message = self.times
        return PLAYED.format(forward=forward, backward=backward, message=message, hw=self.hw)

    @property
    def values(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "bubble": self.stages.waits(self.schedule), "least_bubble": self.stages.bubble,
            "end_us": self.schedule.end_us, "totals": [asdict(one) for one in self.totals],
        }  # fmt: skip


def played(num_ranks: int, sizes: Mapping[str, int], machine: Hardware) -> Piped:
    """Raises  UsageError: microbatches that such stages do not take"""
    chunks, nbytes = sizes["chunks"], sizes["bytes"]
    for name in ("forward_us", "backward_us"):
        whole_number(f"--shape: {name}", sizes[name], 1, UsageError)
    stages = Stages(num_ranks, sizes["microbatches"], chunks)
    message_us = 0.0
    if nbytes:
        message_us = machine.copy_us + machine.word_us + nbytes / machine.copy_gbps / 1e3
    passes = (sizes[one] / chunks for one in ("forward_us", "backward_us"))
    times = Times(*passes, message_us)
    return Piped(stages, times, stages.played(times), machine.name)
