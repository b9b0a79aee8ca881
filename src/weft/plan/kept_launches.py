"""Launches of one call, kept: later calls with tensors like its own put their addresses in.

For calls of a few kernels, beside which no stream does anything; those of plans are the runner's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch

from weft.plan.command_list import ALIGN, CommandList, address_of, extent_bytes, places_of
from weft.plan.launches import Start


class KeptLaunches:
    """Of calls that are alike but for addresses: of their tensors, of their `slots`, and of memory
    for steps between. A look at hundreds of arguments takes ten times as long as a launch."""

    def __init__(self, world: Any, slots: Any) -> None:
        self._world, self._slots = world, slots
        self._is_recording = world.is_recording
        self._listed: CommandList | None = None
        # Not where a launch is no matter of addresses.
        self._can_list = world.backend.by_address is not None

    def run(
        self, tensors: Sequence[torch.Tensor], starts: Callable[[Any], Iterable[Start]],
        local: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Take a slot, and queue what `starts(slot)` gives, on the current stream. `tensors` are
        all that it names beside what the slot and `local` have, and what stays where it is for as
        long as this. Collective."""
        is_recording = self._is_recording()
        slot = self._slots.take(is_recording)
        if self._can_list and not is_recording:
            given = [*map(address_of, tensors)]
            if not reduce(or_, given) % ALIGN:
                there, sizes = places_of(self._world, slot)
                begin, nbytes = (0, 0) if local is None else (local.data_ptr(), local.nbytes)
                places = [0, begin, *given, *there]
                if self._listed is None:
                    extents = [0, nbytes, *map(extent_bytes, tensors), *sizes]
                    self._listed = self._list(places, extents, starts(slot))
                if self._listed is not None:
                    self._listed.run(places)
                    return
        for start in starts(slot):
            start.run()

    def _list(
        self, places: Sequence[int], extents: Sequence[int], starts: Iterable[Start]
    ) -> CommandList | None:
        """The launches with open addresses; None where they cannot be kept."""
        listed = CommandList(self._world, places, extents)
        if not listed.is_clear:  # tensors that overlap, this time
            return None
        self._can_list = all(listed.launch("main", start) for start in starts)
        return listed if self._can_list else None
