"""What a runner asks of a plan whatever its sizes are: found once, kept with the plan.

Calls of all sizes of a class run one plan; the first call of each asks all of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

from weft.compiler import layouts
from weft.ir import device, text
from weft.ir.device import (
    NUM_RANKS,
    After,
    Buffer,
    Call,
    Channel,
    Copy,
    Launch,
    Part,
    Plan,
    Tiles,
    adds_up,
    is_relay,
)
from weft.ir.kinds import WEIGHTED
from weft.ir.tensor import Size, Times
from weft.plan.streams import recordings


class PlanFacts:
    """Of one plan. `PlanFacts.of(plan)` are those that are kept with it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.buffers: dict[str, Buffer] = {one.name: one for one in plan.of(Buffer)}
        self.channels: dict[str, Channel] = {one.name: one for one in plan.of(Channel)}
        self.places = {name: one.place for name, one in self.buffers.items()}
        self.reads = _reads(plan)
        copies: list[Copy] = plan.of(Copy)
        # The streams that wait for tiles; what is recorded as one, and beside it.
        self.copy_streams = tuple(dict.fromkeys(one.stream for one in copies if one.awaits))
        self.recordings = None if plan.of(Call) else recordings(plan.steps, self.copy_streams)
        # Both as command lists have them.
        together, apart = self.recordings or ([], {})
        self.together = tuple(copies_late(together))
        self.apart = tuple(one for some in apart.values() for one in some)
        relays = [one for one in plan.steps if is_relay(one)]
        self.of_sums = {one.stream for one in relays if all(map(adds_up, relays))}
        # Those of which a launch of this plan comes before each.
        is_late = relays[:1] != plan.of(Launch)[:1]
        self.late_sums = self.of_sums if is_late else set[str]()
        # Of calls of a library, what is a part of columns; what engines read.
        self.columns = {one.writes[0] for one in plan.of(Call) if one.function == "columns"}
        self.copied = {one.source for one in copies}
        self.has_calls = bool(plan.of(Call))
        # The open sizes that columns follow from.
        columns = {_name_of(one.sizes[-1]) for one in plan.of(Buffer) if len(one.sizes) > 1}
        self.sizes_of_columns = tuple(sorted(columns - {"", NUM_RANKS}))
        self.is_credited = any(getattr(step, "takes", False) for step in plan.steps)

    @cached_property
    def digest(self) -> str:
        """By which plans of one name are told apart."""
        return text.digest(self._plan.bare.statements)

    @classmethod
    def of(cls, plan: Plan) -> PlanFacts:
        kept = vars(plan)
        if "facts" not in kept:
            kept["facts"] = cls(plan)
        return kept["facts"]


def _reads(plan: Plan) -> layouts.Reads:
    """How a plan's launches and copies read its inputs."""
    tasks = [do for launch in plan.of(Launch) for do in launch.body]
    right = {do.operands[1] for do in tasks if do.kind in WEIGHTED}
    rows = {name for do in tasks for i, name in enumerate(do.operands)
            if i != 1 or do.kind not in WEIGHTED}  # fmt: skip
    rows |= {one.source for one in plan.of(Copy)}
    return layouts.Reads(rows, right - rows, padded=True)


def _name_of(size: Size | Part | Tiles) -> str:
    """Of an open size, or what follows from one; "" of a number."""
    inner = size.size if isinstance(size, Part | Tiles) else size
    inner = inner.size if isinstance(inner, Times) else inner
    return inner if isinstance(inner, str) else ""


def copies_late(steps: Iterable[device.Step]) -> Iterator[device.Step]:
    """Copies behind what other streams launch before they wait for them: queueing copies takes the
    host a while, in which own tiles are multiplied.

    But before a library is called: a first call loads kernels and takes memory, for which the host
    may wait until the device is idle, and it never is while a kernel waits for these copies.
    """
    late: list[device.Step] = []
    for step in steps:
        streams = (step.stream, step.other) if isinstance(step, After) else (step.stream,)
        if isinstance(step, Call) or any(one.stream in streams for one in late):
            yield from late
            late = []
        if isinstance(step, Copy):
            late.append(step)
        else:
            yield step
    yield from late
