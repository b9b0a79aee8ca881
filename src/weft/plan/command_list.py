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
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weft.language import triton_api
from weft.plan.launches import Start

# The place of what stays where it is, and of local memory.
FIXED, LOCAL = 0, 1

# places, the stream that is current
Command = Callable[[Sequence[int], Any], None]
Sized = tuple[list[int], list[int]]

_of_slots: WeakKeyDictionary[Any, Sized] = WeakKeyDictionary()


def places_of(world: Any, slot: Any) -> Sized:
    """Where a slot's parts lie, here and at near peers, and their bytes."""
    found = _of_slots.get(slot)
    if found is None:
        parts = [one for one in (*vars(slot).values(), *slot.arg) if isinstance(one, torch.Tensor)]
        # Of parts that begin at one address the largest.
        sizes = {one.data_ptr(): one.nbytes for one in sorted(parts, key=_nbytes) if one.nbytes}
        own = [*sizes]
        there = [0, *(apart for apart in world.distances if apart)]
        addresses = [address + apart for apart in there for address in own]
        found = _of_slots[slot] = addresses, [*sizes.values()] * len(there)
    return found


def extent_bytes(tensor: torch.Tensor) -> int:
    """From a tensor's first byte to its last; 0 where it is empty."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride())
    last = sum((extent - 1) * stride for extent, stride in steps)
    return (last + 1) * tensor.element_size()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes


class CommandList:
    """Made for one call's places; `run` queues it for any."""

    def __init__(self, world: Any, places: Sequence[int], sizes: Sequence[int]) -> None:
        self._world, self._direct = world, world.backend.by_address
        known = ((at, at + size, i) for i, (at, size) in enumerate(zip(places, sizes)) if size)
        self._known = sorted(known)
        self._begins = [at for at, _, _ in self._known]
        self._commands: list[Command] = []

    @property
    def is_clear(self) -> bool:
        """Is each address in one place alone?"""
        pairs = zip(self._known, self._known[1:])
        return all(end <= begin for (_, end, _), (begin, _, _) in pairs)

    def find(self, address: int) -> tuple[int, int]:
        """Its place, and how far behind that it is."""
        i = bisect_right(self._begins, address) - 1
        if i >= 0:
            begin, end, place = self._known[i]
            if address < end:
                return place, address - begin
        return FIXED, address

    def run(self, places: Sequence[int]) -> None:
        """Queue all of it on the current stream, and on others as they were."""
        current = self._world.current_stream()
        for command in self._commands:
            command(places, current)

    # ---- what is queued, in this order

    def launch(self, stream: str, start: Start) -> bool:
        """False where it cannot be kept."""
        kernel = self._world.load(start.function, *start.arguments, **start.options)
        launch = triton_api.bound_launch(kernel, start.grid, start.arguments, self.find)
        if launch is None:
            return False
        handle = self._handle_of(stream)
        self._commands.append(lambda places, current: launch(places, handle(current)))
        return True

    def move(self, stream: str, dst: torch.Tensor, src: torch.Tensor | None, is_word: bool) -> bool:
        """A `transfers.Move`; False where it cannot be kept: rows that do not lie one behind the
        other."""
        if src is None:
            self._take_token(stream, dst)
            return True
        if not (dst.is_contiguous() and src.is_contiguous()):
            return False
        (to, ahead), (source, behind) = self.find(dst.data_ptr()), self.find(src.data_ptr())
        handle, copy, nbytes = self._handle_of(stream), self._direct.copy, src.nbytes
        self._commands.append(
            lambda places, current: copy(
                places[to] + ahead, places[source] + behind, nbytes, handle(current)
            )
        )
        return True

    def _take_token(self, stream: str, word: torch.Tensor) -> None:
        place, distance = self.find(word.data_ptr())
        handle, take_token = self._handle_of(stream), self._direct.take_token
        self._commands.append(
            lambda places, current: take_token(places[place] + distance, handle(current))
        )

    def wait(self, stream: str, other: str) -> None:
        """`stream` goes on behind what `other` has by then."""
        waiting, first = self._stream_of(stream), self._stream_of(other)
        self._commands.append(lambda _, current: waiting(current).wait(first(current)))

    def _stream_of(self, name: str) -> Callable[[Any], Any]:
        """Of the current stream, which is "main"."""
        if name == "main":
            return lambda current: current
        known = self._world.stream(name)
        return lambda _: known

    def _handle_of(self, name: str) -> Callable[[Any], int]:
        handle = self._direct.handle
        if name == "main":
            return handle
        known = handle(self._world.stream(name))
        return lambda _: known
