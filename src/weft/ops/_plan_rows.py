"""What a plan's launches on whole rows are given; a part of _plan.py, which see. Not an operator.

As all_reduce_rms_norm launches its own kernel, which is of the same template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

import torch

from weft.compiler.lower import source
from weft.ir import core
from weft.ir.device import Launch
from weft.ops import _lanes
from weft.ops._plan_sizes import SizedPlan
from weft.ops._product_launch import Start
from weft.ops.all_reduce_rms_norm import PUSH, Config, Problem, cut_of

# What all_reduce_rms_norm calls them, by the buffers that are pushed.
BY_PACKETS = {1: "one_shot", 2: "two_shot"}


class SummedRows:
    """A launch of the rows template at given sizes."""

    def __init__(self, plan: SizedPlan, launch: Launch, kernel: core.Kernel) -> None:
        self.launch, self.kernel, self.world = launch, kernel, plan.world
        self.function = source.load(kernel).plain
        m, n = plan.shape(launch.writes[0])
        dtype = plan.buffers[launch.writes[0]].dtype
        target, nodes = self.world.target, _lanes.nodes_of(self.world)
        problem = Problem(m, n, self.world.num_ranks, dtype, nodes)
        by_packets = any(one.sort == "packets" for one in kernel.of(core.Param))
        way = BY_PACKETS[len(launch.pushes)] if by_packets else PUSH
        config: Config = cut_of(way, problem, target)
        if launch.tile[0] > 1:
            config = replace(config, tile_m=launch.tile[0])
        config.check(problem, target)
        self.grid = (max(1, config.grid(problem, target) - launch.spare), 1, 1)
        self.options = config.options(problem, target)
        self.parts, self.tile = config.parts(problem), config.tile(problem).as_constexpr()
        self.num_words = problem.num_ranks * self.parts.tiles_m
        if way == BY_PACKETS[1]:
            # One part, of all rows.
            self.parts = self.parts._replace(rows=m, tiles_m=ceil(m / self.tile.m.value))
        num_packets = self.tile.n.value * problem.itemsize // _lanes.PACKET_BYTES
        # A box for each row of a part, source and half.
        boxes = 2 * self.parts.rows * problem.num_ranks
        # By buffer what a slot calls its packets, and how many there are. Those of rows alike lie
        # alike, whichever calls have them: so words that held packets never hold something else.
        self.packets = {
            name: (f"{name}_{num_packets}", boxes * num_packets) for name in launch.pushes
        } if by_packets else {}  # fmt: skip

    def start(
        self, bound: Mapping[str, torch.Tensor], words: Mapping[str, torch.Tensor], slot: Any,
        split: Any,
    ) -> Start:  # fmt: skip
        """The launch with these tensors; `words` are its channels'."""
        given: list[Any] = []
        for one in self.kernel.of(core.Param):
            if one.sort == "number":
                given.append(float(one.by))
            elif one.sort not in ("slot", "world"):
                given.append(words[one.name] if one.sort == "signals" else bound[one.name])
        given += [slot.arg, self.parts, self.tile, self.world.arg]
        return Start(self.function, self.grid, tuple(given), self.options)
