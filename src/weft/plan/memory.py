"""Where a plan's buffers and signals lie at given sizes.

Symmetric buffers are in one slot of a workspace, laid out as the allocate pass says. Beside them is
a signal array for each channel, by whose name findings and tables of waits call it. Local memory is
shared by calls of all sizes. Results are made at each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch

from weft.base.elements import Axes
from weft.base.errors import UnsupportedError
from weft.compiler.lower import kernels
from weft.compiler.passes import allocate
from weft.ir.device import Channel
from weft.plan.launches import KernelLaunch
from weft.plan.sizes import SizedPlan


class Memory:
    """The memory of a plan on one rank, for the kernels that it launches, by name."""

    def __init__(self, sized: SizedPlan, launches: Mapping[str, KernelLaunch]) -> None:
        self.sized, self.plan, self.world = sized, sized.plan, sized.world
        self.launches = launches
        # By array of signals what its indices stand for. One holds a call's epochs or, as tokens
        # do, zeros between calls: never now this, now that.
        self.axes: dict[str, Axes] = {}
        for channel in sized.channels.values():
            if channel.by != "packet":
                self._add_signals(channel)
        # And how many words it has.
        self._counts = {
            name: prod([extent for _, extent in axes]) for name, axes in self.axes.items()
        }
        self._regions = allocate.layout(self.plan, sized.sizes, self.world.num_ranks)
        kept = [one for one in self._of_role("local") if one.buffer not in self.plan.results]
        ends = (max(1, one.offset + one.num_bytes) for one in kept)
        self._local_bytes = max(ends, default=0)
        # By the buffer that packets are of, what a slot calls them.
        self._packets = {name: array for one in launches.values()
                         for name, array in one.packets.items()}  # fmt: skip
        self._is_credited = sized.facts.is_credited
        # Halves of boxes take turns; and whoever waits for credits waits for those of every call.
        self._num_slots = 1 if self._packets and not self._is_credited else None
        self._wanted = self._request()

    @cached_property
    def _likes(self) -> list[torch.Tensor]:
        sized, device = self.sized, self.world.device
        return [
            like(sized.shape(name), getattr(torch, sized.buffers[name].dtype), device)
            for name in self.plan.results
        ]

    def _add_signals(self, channel: Channel) -> None:
        """Give the channel its array; beside tokens there are as many others of two kinds."""
        names = [channel.name]
        if channel.to == "engine":
            names += kernels.beside_tokens(channel)
        self.axes |= dict.fromkeys(names, self._axes_of(channel))

    def _axes_of(self, channel: Channel) -> Axes:
        if isinstance(channel.chunks, int):
            ranks = "for rank" if channel.to == "engine" else "from rank"
            chunks = channel.chunks * self.sized.chunks_of(channel)
            return (ranks, self.world.num_ranks), ("chunk", chunks)
        makers = [one for one in self.launches.values() if channel.name in one.launch.announces]
        if not makers:
            raise UnsupportedError(
                f"{self.plan.name}: no kernel is known that announces {channel.name}",
                place=channel.place,
            )
        if channel.to == "partner":
            total = self.sized.shape(channel.buffer)[0]
            return (*makers[0].axes[:-1], ("of a relay", total))
        return makers[0].axes

    def _of_role(self, role: str) -> list[allocate.Region]:
        return [one for one in self._regions.values() if one.role == role]

    # ---- at each call

    @cached_property
    def slots(self) -> Any:
        """What its calls ask the world for: to `take` one at each, or to `reserve` it."""
        key, buffers, signals, shared = self._wanted
        return self.world.asked(
            key, buffers, signals, num_slots=self._num_slots, shared=shared, axes=self.axes
        )

    def goes_with(self, other: Memory) -> None:
        """Slots hold what the other plan's calls need too, which are of the same problem: so they
        never grow between them. Before any of them is called."""
        (name, *parts), (_, *others) = self._wanted, other._request()
        buffers, signals, shared = map(_larger, parts, others)
        self._wanted = (name, buffers, signals, shared)

    def _request(self) -> tuple[str, Any, Any, Any]:
        """What slots are called; their buffers, their signals, and the buffers that calls of other
        programs share, by name, each in one dimension, with its dtype."""
        ends = [one.offset + one.num_bytes for one in self._of_role("symmetric")]
        memory = {"memory": ((_roomy(max(ends)),), torch.uint8)} if ends else {}
        buffers: dict[str, Any] = {} if self._is_credited else memory
        signals: dict[str, Any] = {
            name: (_roomy(count), torch.int64) for name, count in self._counts.items()
        }
        for launch in self.launches.values():
            buffers |= launch.buffers
            signals |= launch.signals
        name = f"program {self.plan.name}"
        if not self._is_credited:
            name += " without credits"
        return name, buffers, signals, memory if self._is_credited else None

    def signals_of(self, slot: Any, name: str) -> torch.Tensor:
        """A channel's in the slot, which may have room for more."""
        return getattr(slot, name)[: self._counts[name]]

    def local(self) -> torch.Tensor | None:
        """What lies between the steps of a call, in memory that calls of all sizes share."""
        if not self._local_bytes:
            return None
        return self.world.scratch(f"program {self.plan.name}", self._local_bytes)

    def results(self) -> tuple[torch.Tensor, ...]:
        """Fresh ones."""
        return tuple(map(torch.empty_like, self._likes))

    def bind(
        self, tensors: Mapping[str, Any], results: Sequence[torch.Tensor], slot: Any
    ) -> dict[str, torch.Tensor]:
        """Every buffer as a tensor."""
        local = self.local()
        found = {**tensors, **dict(zip(self.plan.results, results, strict=True))}
        found |= {name: getattr(slot, array) for name, array in self._packets.items()}
        for name, buffer in self.sized.buffers.items():
            if name in found or buffer.role == "tables":
                continue
            shape, dtype = self.sized.shape(name), getattr(torch, buffer.dtype)
            region = self._regions[name]
            memory = slot.memory if buffer.role == "symmetric" else local
            assert memory is not None
            part = memory[region.offset : region.offset + region.num_bytes].view(dtype)
            if buffer.role == "symmetric":
                # As large as the fullest: peers find it by one stride.
                found[name] = part.view(self.sized.shape(name, rank=0))
            else:
                found[name] = part[: prod(shape)].view(shape)
        return found


def like(shape: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """What `torch.empty_like` makes such a tensor of, in half the time that a shape takes it: one
    element in memory, of which all are views; but of one or none the strides would be 0."""
    small = shape if prod(shape) <= 1 else ()
    return torch.empty(small, dtype=dtype, device=device).expand(shape)


def _roomy(size: int) -> int:
    """Up to a sixteenth more: calls of sizes that are near ask for slots alike, which are cut
    once."""
    step = max(1, (1 << size.bit_length()) // 32)
    return -(-size // step) * step


def _larger(one: Any, other: Any) -> dict[str, Any] | None:
    """Of two requests the larger part of each name; what shares nothing shares nothing then."""
    if one is None or other is None:
        return one
    return {
        name: max((x[name] for x in (one, other) if name in x), key=lambda part: part[0])
        for name in {**one, **other}
    }
