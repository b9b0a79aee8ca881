"""What each step of a plan launches: its kernels, rows on their way, waits for a slot's credits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

import torch
from triton import next_power_of_2

from weft.base.errors import UnsupportedError
from weft.compiler.lower import kernels
from weft.ir.device import RELAY, Channel, Copy, Launch, Take, is_relay
from weft.language.mapping import StaticMapping
from weft.plan import moving, scales
from weft.plan.launches import MOVING_WARPS, KernelLaunch, Start
from weft.plan.memory import Memory
from weft.plan.sizes import SizedPlan
from weft.tiles import relay

# Elements that a program moves at once, and rows' bytes that a program stages at least.
BLOCK, STAGE_BYTES = 8192, 1 << 18
# Elements of a tile that a relay sums at once.
SUMMED = 4096
MOVES = ("stage", "edges", "all_gather", "all_to_all", "push_scales", RELAY)

Tensors = Mapping[str, torch.Tensor]


class Starts:
    """The launches of a plan's steps."""

    def __init__(
        self, sized: SizedPlan, memory: Memory, launches: Mapping[str, KernelLaunch]
    ) -> None:
        self.sized, self.plan, self.world = sized, sized.plan, sized.world
        self.memory, self.launches = memory, launches

    def of(self, step: Launch | Take, bound: Tensors, slot: Any) -> Iterator[Start]:
        """What the step launches, one behind the other; nothing where it has nothing to move."""
        if isinstance(step, Take):
            copy = self._copied_behind(step)
            function = moving.take_pieces if copy is not None and copy.piece else moving.take
            given = (*self._words_of(copy, slot), slot.arg, self.world.arg)
            yield Start(function, (1, 1, 1), given, {"num_warps": 1})
        elif not self._is_empty(step):
            if (launch := self.launches.get(step.kernel)) is None:
                yield self._moving(step, bound, slot)
            else:
                yield self._kernel(step, launch, bound, slot)
            yield from self._hearing(step, slot)

    def _kernel(self, step: Launch, launch: KernelLaunch, bound: Tensors, slot: Any) -> Start:
        channels, there = self.sized.channels, self.memory.axes
        named = [name for name in (*step.awaits, *step.announces) if name in there]
        for name in [name for name in named if channels[name].to == "engine"]:
            named += kernels.beside_tokens(channels[name])
        words = {name: self.memory.signals_of(slot, name) for name in named}
        split: Any = ()
        for one in channels.values():
            if one.name in step.awaits or (one.own and one.buffer in step.reads):
                split = self.sized.split(one)
                break
        if step.piece:
            launch = launch.of(step)
        return launch.start(bound, words, slot, split)

    def _hearing(self, step: Launch, slot: Any) -> Iterator[Start]:
        """What waits behind a launch for ranks that none of its tiles waits for.

        Whoever has awaited a channel has heard of all ranks: by that rule steps behind it wait no
        more. But a rank without rows is in nobody's tiles, and one without columns has no tile.
        Behind the slot's last use nothing goes by the rule.
        """
        if step.gives or is_relay(step):
            return
        launch = self.launches.get(step.kernel)
        columns = 1 if launch is None else launch.n
        for name in step.awaits:
            channel = self.sized.channels[name]
            # Of sums each tile waits for all, be they of no rows.
            is_of_rows = channel.to == "all" or (channel.own and self.world.num_ranks > 1)
            if name in self.memory.axes and is_of_rows and _has_chunks(channel):
                split, words = self.sized.split(channel), self.memory.signals_of(slot, name)
                if not columns or split.rank_rows * (self.world.num_ranks - 1) >= split.rows:
                    given = (words, words.numel(), slot.arg, self.world.arg)
                    yield Start(moving.wait_all, (1, 1, 1), given, {"num_warps": 1})

    def _words_of(self, copy: Copy | None, slot: Any) -> tuple[torch.Tensor, int]:
        """The words that a copy announces, and how many a rank has of them; none of pieces where
        there is nobody to copy them to."""
        if copy is None or (copy.piece and self.world.num_ranks == 1):
            return slot.arg.epoch, 0
        words = self.memory.signals_of(slot, copy.announces)
        return words, words.numel() // self.world.num_ranks

    def _copied_behind(self, step: Take) -> Copy | None:
        """What the step's stream copies before it takes credits again."""
        steps = [one for one in self.plan.steps if one.stream == step.stream]
        behind = steps[next(i for i, one in enumerate(steps) if one is step) + 1 :]
        for one in behind:
            if isinstance(one, Copy):
                return one
            if isinstance(one, Take):
                return None
        return None

    def _moving(self, step: Launch, bound: Tensors, slot: Any) -> Start:
        """Own rows, to the own slot or to every rank's; or what a relay passes on with them."""
        kind = step.body[0].kind if step.body else ""
        if step.template != "move" or kind not in MOVES:
            raise UnsupportedError(
                f"{step.kernel}: no kernel is known for {kind} with template={step.template}; run "
                "the program with lowering='unfused'",
                place=step.place,
            )
        (name,), target = step.body[0].operands, step.body[0].result
        makers = [one for one in self.launches.values() if name in one.launch.pushes]
        if kind == RELAY and makers:
            return self._relaying(step, makers[0], bound, slot)
        columns = self.sized.shape(name)[1]
        split = StaticMapping.of(self.sized.shape(target)[0], self.world.num_ranks, chunks=1)
        if kind == "push_scales":
            return scales.pushed(bound[name], bound[target], split, step.takes, slot, self.world)
        given: tuple = (bound[name], bound[target])
        num_bytes = self.sized.shape(name, rank=0)[0] * columns * bound[name].element_size()
        function, programs = moving.stage, max(1, ceil(num_bytes / STAGE_BYTES))
        if kind == RELAY and step.awaits != step.announces:
            raise UnsupportedError(
                f"{step.kernel}: awaits={step.awaits}; a relay waits for what it announces",
                place=step.place,
            )
        if kind in ("all_gather", "all_to_all", RELAY):
            (channel,) = step.announces
            split = self.sized.split(self.sized.channels[channel])
            function, programs = moving.push, self.world.num_ranks * split.chunks
            given = (*given, self.memory.signals_of(slot, channel))
        if kind == "stage":
            pushed = [one for one in self.plan.of(Copy) if one.side == "push"]
            copy = next((one for one in pushed if one.target == target), None)
            given = (*given, *self._words_of(copy, slot))
        given = (*given, slot.arg, split, columns, step.takes, self.world.arg)
        if kind == RELAY:
            resident = max(1, self.world.target.num_sms - step.spare)
            function, programs = relay.relay_chunks, min(resident, split.chunks)
        if kind == "edges":
            function = moving.edges
        if kind == "all_to_all":
            width = min(BLOCK, 1 << max(0, columns - 1).bit_length())
            given = (*given, width, BLOCK // width)
            return Start(moving.push_parts, (programs, 1, 1), given, {"num_warps": MOVING_WARPS})
        if kind in ("edges", RELAY):
            given = (*given, self._tile_rows(target))
        if kind == "all_gather":
            given = (*given, step.order == "hierarchical_gather")
        return Start(function, (programs, 1, 1), (*given, BLOCK), {"num_warps": MOVING_WARPS})

    def _relaying(self, step: Launch, maker: KernelLaunch, bound: Tensors, slot: Any) -> Start:
        """Of a kernel's tiles for other nodes' ranks one sum of this node's shares, to each."""
        words = [self.memory.signals_of(slot, name) for name in (*step.awaits, *step.announces)]
        if len(words) != 2:
            raise UnsupportedError(
                f"{step.kernel}: awaits={step.awaits}, announces={step.announces}; a relay of sums "
                "waits for shares and announces what it has added up", place=step.place,
            )  # fmt: skip
        parts = maker.parts
        resident = max(1, self.world.target.num_sms - step.spare)
        programs = max(1, min(resident, parts.tiles_m * parts.num_n))
        columns = min(SUMMED, next_power_of_2(parts.tile_n))
        given = (
            *(bound[name] for name in (*step.reads, *step.pushes)), *words, slot.arg, parts,
            maker.groups, self.world.arg, SUMMED // columns, columns,
        )  # fmt: skip
        return Start(relay.relay_tiles, (programs, 1, 1), given, dict(maker.of_relay))

    def _tile_rows(self, gathered: str) -> int:
        """The height of the tiles in which gathered rows are read; where products differ, or tables
        say which rows, more than there are: then each row may lie in a tile with others'."""
        readers = [one.launch for one in self.launches.values() if gathered in one.launch.reads]
        heights = {one.tile[0] for one in readers}
        is_cut = len(heights) == 1 and all(one.template != "grouped" for one in readers)
        return heights.pop() if is_cut else 1 << 30

    def _is_empty(self, step: Launch) -> bool:
        """Has a launch nothing to move, since no tile lies across two ranks' rows?"""
        if [do.kind for do in step.body] != ["edges"]:
            return False
        (target,) = step.writes
        rows, ranks = self.sized.shape(target)[0], self.world.num_ranks
        return rows % (ranks * self._tile_rows(target)) == 0


def _has_chunks(channel: Channel) -> bool:
    """Is it announced by chunks of rows, not tile by tile?"""
    return isinstance(channel.chunks, int)
