"""What lies where in a core's scratchpad while a kernel runs; twice, what is got while it computes.

x    0 .. 2048      2048 .. 4096
sums 4096 .. 8192
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.manycore.record import Machine


@dataclass(frozen=True)
class Request:
    """A buffer, `copies` of it where transfers and computation overlap; `pitch`: of a row."""

    name: str
    rows: int
    pitch: int
    copies: int = 1

    @property
    def num_bytes(self) -> int:
        return self.rows * self.pitch


@dataclass(frozen=True)
class Buffer:
    """Where the copies of a request begin."""

    request: Request
    offsets: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def pitch(self) -> int:
        return self.request.pitch

    @property
    def end(self) -> int:
        return self.offsets[-1] + self.request.num_bytes


@dataclass(frozen=True)
class Map:
    """All buffers of a kernel. They live as long as it does, so one follows the other."""

    buffers: tuple[Buffer, ...]

    def __getitem__(self, name: str) -> Buffer:
        return next(one for one in self.buffers if one.name == name)

    @property
    def used_bytes(self) -> int:
        return max((one.end for one in self.buffers), default=0)


def allocate(requests: Sequence[Request], machine: Machine) -> Map | None:
    """Each on lines of its own; None where the scratchpad does not hold them."""
    buffers, at = [], 0
    for one in requests:
        offsets = []
        for _ in range(one.copies):
            offsets.append(at)
            at += machine.aligned(one.num_bytes)
        buffers.append(Buffer(one, tuple(offsets)))
    return Map(tuple(buffers)) if at <= machine.scratchpad_bytes else None
