"""What a call of a plan queues, kept: for other tensors and slots it differs by addresses alone.

A call of a plan at given sizes launches the same kernels, queues the same copies and lets the same
streams wait, whatever its tensors are. The first call finds all of it out, with Triton's look at
each argument; later ones put their addresses in. That is what a recording does, without a
millisecond to make one, and it is as good for tensors that come once.

    places = [0, local memory, inputs and results .., the slot's parts, own and peers' ..]

An address in an argument is a place and a distance from it; place 0 is for those that stay.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter, gt, methodcaller
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weft.language import triton_api
from weft.plan.launches import Start
from weft.runtime.commands import Commands

# Kernels of lists were compiled for operands that begin at so many bytes.
ALIGN = 16
address_of = methodcaller("data_ptr")

# The place of what stays where it is, and of local memory.
FIXED, LOCAL = 0, 1

Sized = tuple[list[int], list[int]]

_of_slots: WeakKeyDictionary[Any, Sized] = WeakKeyDictionary()


def places_of(world: Any, slot: Any) -> Sized:
    """Where a slot's parts lie, here and at near peers, and their bytes."""
    found = _of_slots.get(slot)
    if found is None:
        parts = [one for one in (*vars(slot).values(), *slot.arg) if isinstance(one, torch.Tensor)]
        # Of parts that begin at one address the largest.
        parts.sort(key=attrgetter("nbytes"))
        sizes = {one.data_ptr(): one.nbytes for one in parts if one.nbytes}
        own = [*sizes]
        there = [0, *(apart for apart in world.distances if apart)]
        addresses = [address + apart for apart in there for address in own]
        found = _of_slots[slot] = addresses, [*sizes.values()] * len(there)
    return found


def extent_bytes(tensor: torch.Tensor) -> int:
    """From a tensor's first byte to its last; 0 where it is empty."""
    if not tensor.numel():
        return 0
    elements = 1
    for extent, stride in zip(tensor.shape, tensor.stride()):
        elements += (extent - 1) * stride
    return elements * tensor.element_size()


def _spans(
    places: Sequence[int], sizes: Sequence[int], numbers: range
) -> list[tuple[int, int, int]]:
    """Where the places of these numbers begin and end; of those that are not empty."""
    return [(places[i], places[i] + sizes[i], i) for i in numbers if sizes[i]]


class CommandList(Commands):
    """Made for one call's places; `run` queues it for any.

    `there` are the places of the slot it is made with. `like` is a list of the same plan at other
    sizes, whose launches are bound again (decisions/042).
    """

    def __init__(
        self, world: Any, places: Sequence[int], sizes: Sequence[int],
        there: Sequence[int] | None = None, like: CommandList | None = None,
    ) -> None:  # fmt: skip
        super().__init__(world)
        self.there = there
        self._bound: list[Any] = []  # what is known of each launch
        self._like: list[Any] = like._bound if like is not None else []
        first = len(places) - len(there or ())
        self._finds_alike = like is not None and like.there is there
        if like is not None and self._finds_alike:
            self._of_slot = like._of_slot
        else:
            self._of_slot = sorted(_spans(places, sizes, range(first, len(places))))
        self._known = sorted([*self._of_slot, *_spans(places, sizes, range(first))])
        self._begins = [at for at, _, _ in self._known]

    @property
    def is_clear(self) -> bool:
        """Is each address in one place alone?"""
        ends = [end for _, end, _ in self._known]
        return not any(map(gt, ends, self._begins[1:]))

    def find(self, address: int) -> tuple[int, int]:
        """Its place, and how far behind that it is."""
        i = bisect_right(self._begins, address) - 1
        if i >= 0:
            begin, end, place = self._known[i]
            if address < end:
                return place, address - begin
        return FIXED, address

    # ---- what is queued, in this order

    def launch(self, stream: str, start: Start) -> bool:
        """False where it cannot be kept."""
        number, launch = len(self._bound), None
        if number < len(self._like):
            launch = self._like[number].again(*start, self.find, finds_alike=self._finds_alike)
        if launch is None:
            kernel = self._world.load(start.function, *start.arguments, **start.options)
            launch = triton_api.bound_launch(kernel, *start, self.find)
        if launch is None:
            return False
        self._bound.append(launch.about)
        self.call(stream, launch.run)
        return True

    def move(self, stream: str, dst: torch.Tensor, src: torch.Tensor | None, is_word: bool) -> bool:
        """A `transfers.Move`; False where it cannot be kept: neither in one piece nor rows of
        elements side by side."""
        to = self.find(dst.data_ptr())
        if src is None:
            self.take_token(stream, to)
            return True
        source = self.find(src.data_ptr())
        if dst.is_contiguous() and src.is_contiguous():
            self.copy(stream, to, source, src.nbytes)
            return True
        if src.dim() != 2 or (dst.stride(1), src.stride(1)) != (1, 1):
            return False
        size, (rows, columns) = src.element_size(), src.shape
        pitches = dst.stride(0) * size, src.stride(0) * size
        self.copy_rows(stream, to, source, (rows, columns * size), pitches)
        return True
