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
    """Of calls that are alike but for addresses: of their tensors, of their slots, and of memory
    for steps between. A look at hundreds of arguments takes ten times as long as a launch."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._listed: CommandList | None = None
        # Not where a launch is no matter of addresses.
        self._can_list = world.backend.by_address is not None

    def run(
        self, tensors: Sequence[torch.Tensor], slot: Any, is_recording: bool,
        starts: Callable[[], Iterable[Start]], local: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Queue what `starts()` gives, on the current stream. `tensors` are all that it names
        beside what the slot and `local` have, and what stays where it is for as long as this."""
        if is_recording or not self._run_listed(tensors, slot, starts, local):
            for start in starts():
                start.run()

    def _run_listed(
        self, tensors: Sequence[torch.Tensor], slot: Any, starts: Callable[[], Iterable[Start]],
        local: torch.Tensor | None,
    ) -> bool:  # fmt: skip
        if not self._can_list:
            return False
        given = [*map(address_of, tensors)]
        if reduce(or_, given) % ALIGN:
            return False
        there, sizes = places_of(self._world, slot)
        begin, nbytes = (0, 0) if local is None else (local.data_ptr(), local.nbytes)
        places = [0, begin, *given, *there]
        if self._listed is None:
            sizes = [0, nbytes, *map(extent_bytes, tensors), *sizes]
            listed = CommandList(self._world, places, sizes)
            if not listed.is_clear:  # tensors that overlap, this time
                return False
            self._can_list = all(listed.launch("main", start) for start in starts())
            if not self._can_list:
                return False
            self._listed = listed
        self._listed.run(places)
        return True
