"""What a call queues of a plan that also calls libraries: a list for the steps between two calls.

    gather rows by copy engines, multiply | torch's function | multiply, sum
    CommandList                             Call               CommandList

A library's result is fresh at each call, and a place like the others: the lists behind it put its
address in. What cannot be kept is queued step by step, as without a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.ir import device
from weft.ir.device import Call
from weft.plan.calls import Doing, Here, doing
from weft.plan.command_list import ALIGN, CommandList, extent_bytes

Bound = dict[str, Any]


@dataclass
class _Part:
    """Steps of the plan's own, then the call of a library, but for the last part.

    `listed` is None until it was tried, and False where it cannot be; `is_place`: is the call's
    result memory of its own, not a part of something that is a place already?
    """

    steps: list[device.Step] = field(default_factory=list)
    call: Call | None = None
    do: Doing | None = None
    listed: CommandList | bool | None = None
    is_place: bool | None = None


class MixedList:
    """Made for a plan at given sizes; `queue` queues a call.

    `fill` adds steps to a list, or says that it cannot; `queue_steps` queues them; `packed` are
    results of calls that kernels read row by row, `results` the plan's, for which there is room.
    """

    def __init__(
        self, world: Any, steps: Iterable[device.Step], packed: set[str], results: Sequence[str],
        fill: Callable[[CommandList, Sequence[device.Step], Bound, Any], bool],
        queue_steps: Callable[[Sequence[device.Step], Bound, Any], None],
    ) -> None:  # fmt: skip
        self._world, self._packed, self._results = world, packed, results
        self._fill, self._queue_steps = fill, queue_steps
        self._parts = [_Part()]
        for step in steps:
            if isinstance(step, Call):
                self._parts[-1].call, self._parts[-1].do = step, doing(step)
                self._parts.append(_Part())
            else:
                self._parts[-1].steps.append(step)

    @property
    def is_new(self) -> bool:
        """Are there steps of which no list was made yet?"""
        return any(one.listed is None for one in self._parts if one.steps)

    @property
    def lists(self) -> list[CommandList]:
        """Those that are kept."""
        return [one.listed for one in self._parts if isinstance(one.listed, CommandList)]

    def queue(
        self, places: list[int], extents: Callable[[], list[int]], bound: Bound, slot: Any,
        here: Here,
    ) -> None:  # fmt: skip
        """The call, with these places, of which `extents` gives the bytes. Libraries' results are
        added to what is `bound`."""
        made: list[torch.Tensor] = []
        for i, part in enumerate(self._parts):
            if part.listed is None and part.steps:
                part.listed = self._list(part, places, extents, made, bound, slot)
            if isinstance(part.listed, CommandList):
                part.listed.run(places)
            elif part.steps:
                self._queue_steps(part.steps, bound, slot)
            if (call := part.call) is not None:
                assert part.do is not None
                (name,) = call.writes
                out = bound[name] if name in self._results else None
                result = part.do([bound[one] for one in call.reads], here, out)
                bound[name] = result = result.contiguous() if name in self._packed else result
                if part.is_place is None:
                    self._place(i, result, places, extents, made)
                if part.is_place:
                    places.append(result.data_ptr())
                    made.append(result)

    def _list(
        self, part: _Part, places: Sequence[int], extents: Callable[[], list[int]],
        made: Sequence[torch.Tensor], bound: Bound, slot: Any,
    ) -> CommandList | bool:  # fmt: skip
        sizes = [*extents(), *map(extent_bytes, made)]
        listed = CommandList(self._world, places, sizes)
        return listed if listed.is_clear and self._fill(listed, part.steps, bound, slot) else False

    def _place(
        self, number: int, result: Any, places: Sequence[int], extents: Callable[[], list[int]],
        made: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """Find out whether a library's result is a place. Of tables, and of what kernels were
        compiled for at other addresses, nothing behind is kept."""
        part = self._parts[number]
        part.is_place = False
        if not isinstance(result, torch.Tensor) or result.data_ptr() % ALIGN:
            for behind in self._parts[number + 1 :]:
                behind.listed = False
            return
        known = CommandList(self._world, places, [*extents(), *map(extent_bytes, made)])
        place, _ = known.find(result.data_ptr())
        part.is_place = place == 0 and result.numel() > 0
