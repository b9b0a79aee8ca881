"""A schedule in time as plain records: what each rank's engines do when, and what waits for what.

The emulator's clock gives them after a run, the compiler's cost model of a plan before one; what
draws them (`weft timeline`) or writes them down (`weft trace`) need not know which.
"""

from __future__ import annotations

from typing import NamedTuple

# What a span is. "program" holds its own waits and work; the others hold nothing.
KINDS = {
    "kernel": "a launch, from its first program to its last",
    "program": "a program of a kernel, on one SM",
    "work": "a program loads, multiplies and stores; a tile, where they are known",
    "wait": "nothing: a signal, an event or a barrier is not there yet",
    "copy": "a copy engine moves bytes",
    "signal": "a copy engine writes a signal word, behind its data",
    "transfer": "programs move bytes over a link",
    "torch": "an operation of a library",
}


class Span(NamedTuple):
    """Something that one rank did, in microseconds from the start. `kind` is of KINDS.

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
