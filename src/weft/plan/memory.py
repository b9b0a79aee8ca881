"""Where a plan's buffers and signal words lie at given sizes.

Symmetric buffers are in one slot of a workspace, laid out as the allocate pass says; so are the
words of all channels, in one array, and in others those that hold zeros between calls. Local memory
is shared by calls of all sizes. Results are made at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from weft.base.errors import UnsupportedError
from weft.compiler.lower import kernels
from weft.compiler.passes import allocate
from weft.ir.device import Channel
from weft.plan.launches import KernelLaunch
from weft.plan.sizes import SizedPlan


@dataclass(frozen=True)
class Words:
    """Where words lie in one of the slot's arrays: where a call's epochs are set, or one that holds
    zeros between calls, whatever else a slot is used for."""

    first: int
    count: int
    array: str = "words"


class Memory:
    """The memory of a plan on one rank, for the kernels that it launches, by name."""

    def __init__(self, sized: SizedPlan, launches: Mapping[str, KernelLaunch]) -> None:
        self.sized, self.plan, self.world = sized, sized.plan, sized.world
        self.launches = launches
        self.words: dict[str, Words] = {}
        for channel in sized.channels.values():
            if channel.by != "packet":
                self._place_words(channel)
        self._regions = allocate.layout(self.plan, sized.sizes, self.world.num_ranks)
        kept = [one for one in self._of_role("local") if one.buffer not in self.plan.results]
        ends = (max(1, one.offset + one.num_bytes) for one in kept)
        self._local_bytes = max(ends, default=0)
        # By the buffer that packets are of, what a slot calls them.
        self._packets = {name: array for one in launches.values()
                         for name, array in one.packets.items()}  # fmt: skip
        self._is_credited = any(getattr(step, "takes", False) for step in self.plan.steps)
        # Halves of boxes take turns; and whoever waits for credits waits for those of every call.
        self._num_slots = 1 if self._packets and not self._is_credited else None
        self._asked: tuple[str, dict[str, Any], dict[str, Any]] = self._request()

    def _place_words(self, channel: Channel) -> None:
        """Give the channel its words; beside tokens there are as many others of two kinds."""
        count, named = self._count_words(channel), {channel.name: "words"}
        if channel.to == "engine":
            stored, told = kernels.beside_tokens(channel)
            named = {channel.name: "tokens", stored: "stored", told: "words"}
        for name, array in named.items():
            there = [one for one in self.words.values() if one.array == array]
            # Each begins at 16 bytes: Triton specialises kernels by that.
            first = sum(one.count + one.count % 2 for one in there)
            self.words[name] = Words(first, count, array)

    def _count_words(self, channel: Channel) -> int:
        if isinstance(channel.chunks, int):
            return self.world.num_ranks * channel.chunks * self.sized.chunks_of(channel)
        makers = [one for one in self.launches.values() if channel.name in one.launch.announces]
        if not makers:
            raise UnsupportedError(
                f"{self.plan.name}: no kernel is known that announces {channel.name}",
                place=channel.place,
            )
        return makers[0].num_words

    def _of_role(self, role: str) -> list[allocate.Region]:
        return [one for one in self._regions.values() if one.role == role]

    # ---- at each call

    def take_slot(self, take: Callable[..., Any] | None = None) -> Any:
        """The next one. `take` without a turn: the world's `reserve`."""
        return (take or self.world.workspace)(*self._asked, num_slots=self._num_slots)

    def goes_with(self, other: Memory) -> None:
        """Slots hold what the other plan's calls need too, which are of the same problem: so they
        never grow between them."""
        (name, buffers, signals), (_, others, theirs) = self._asked, other._request()
        self._asked = name, _larger(buffers, others), _larger(signals, theirs)

    def _request(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """What slots are called, and their buffers and signals by name, each in one dimension, with
        its dtype."""
        ends = [one.offset + one.num_bytes for one in self._of_role("symmetric")]
        buffers: dict[str, Any] = {}
        if ends:
            buffers["memory"] = ((max(ends),), torch.uint8)
        signals = {"words": (1, torch.int64)}
        for one in self.words.values():
            num_words = max(one.first + one.count, signals.get(one.array, (1,))[0])
            signals[one.array] = (num_words, torch.int64)
        for launch in self.launches.values():
            buffers |= launch.buffers
            signals |= launch.signals
        name = f"program {self.plan.name}"
        if self._packets and not self._is_credited:
            name += " without credits"
        return name, buffers, signals

    def words_of(self, slot: Any, name: str) -> torch.Tensor:
        """A channel's words in the slot."""
        words = self.words[name]
        return getattr(slot, words.array)[words.first : words.first + words.count]

    def local(self) -> torch.Tensor | None:
        """What lies between the steps of a call, in memory that calls of all sizes share."""
        if not self._local_bytes:
            return None
        return self.world.scratch(f"program {self.plan.name}", self._local_bytes)

    def results(self) -> list[torch.Tensor]:
        """Fresh ones."""
        return [
            torch.empty(
                self.sized.shape(name), dtype=getattr(torch, self.sized.buffers[name].dtype),
                device=self.world.device,
            )
            for name in self.plan.results
        ]  # fmt: skip

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


def _larger(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Of two requests the larger part of each name."""
    return {
        name: max((x[name] for x in (one, other) if name in x), key=lambda part: part[0])
        for name in {**one, **other}
    }
