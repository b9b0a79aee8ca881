"""What is reported of measured times: medians, percentiles, ratio, ceiling, overlap efficiency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.base.errors import UsageError


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie, by the nearest rank.

    Raises  UsageError: no values
    """
    if not values:
        raise UsageError("no percentile of no values: every round of this variant was lost")
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


@dataclass(frozen=True)
class Times:
    """One variant's time per round, each the slowest rank's. Units  us"""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return percentile(self.rounds, 0.5)

    @property
    def p10(self) -> float:
        return percentile(self.rounds, 0.1)

    @property
    def p90(self) -> float:
        return percentile(self.rounds, 0.9)


@dataclass(frozen=True)
class Parts:
    """The unfused way's medians, measured in the same rounds; None where it has no such part.

    gemm: the product alone; comm: the collective alone; serial: both in order, or the vendor's
    collective where there is nothing to multiply. Units  us
    """

    gemm: float | None = None
    comm: float | None = None
    serial: float | None = None

    @property
    def ceiling(self) -> float | None:
        """The best speed-up that overlap alone can give: (gemm + comm) / max(gemm, comm)."""
        if self.gemm is None or self.comm is None:
            return None
        return (self.gemm + self.comm) / max(self.gemm, self.comm)

    def ratio(self, time: float) -> float | None:
        """How many times faster than the unfused way."""
        return None if self.serial is None else self.serial / time

    def overlap_efficiency(self, time: float) -> float | None:
        """(serial - time) / min(gemm, comm): 1 hides the shorter part, below 0 loses."""
        if self.gemm is None or self.comm is None or self.serial is None:
            return None
        return (self.serial - time) / min(self.gemm, self.comm)
