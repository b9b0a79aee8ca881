"""Launches of products by a router's tables in a plan, of the hooks that ag_moe and moe_rs have."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch

from weft.base.parts import full_part
from weft.compiler import layouts
from weft.compiler.lower import source
from weft.ir import core
from weft.ir.device import Do, Launch
from weft.plan.launches import KernelLaunch, Start
from weft.plan.product_launches import PLAIN_STAGES, PLAIN_WARPS
from weft.plan.sizes import SizedPlan
from weft.tiles import blocking, gemm, route
from weft.tiles.hooks.table import Experts, Tables

# Rows of tiles that share columns in L2.
GROUP_M = 4


class GroupedProduct(KernelLaunch):
    """A launch of the GEMM template by tables at given sizes."""

    def __init__(
        self, plan: SizedPlan, launch: Launch, kernel: core.Kernel, tensors: Mapping[str, Any]
    ) -> None:
        self.launch, self.kernel, self.world = launch, kernel, plan.world
        self.function = source.load(kernel).plain
        product: Do = next(do for do in launch.body if do.kind == "grouped_matmul")
        _, weights, self.table = product.operands
        m, top_k, experts = plan.shape(self.table)
        _, self.k, self.n = plan.shape(weights)
        self.slots, self.b_is_nk = m * top_k, layouts.is_nk(tensors[weights])
        for name in (name for name in launch.reads if name in tensors):
            given = tensors[name].mT if name == weights and self.b_is_nk else tensors[name]
            layouts.check_tensor(launch.kernel, name, given, self.world)
        tile_m, tile_n, _ = launch.tile
        rows = full_part(m, self.world.num_ranks)
        room = route.most_tiles(self.slots, experts, tile_m)
        columns, lanes = ceil(self.n / tile_n), self._lanes(plan)
        self.experts = Experts(m, rows, top_k, room, columns, GROUP_M, lanes)
        programs = max(1, self.world.target.num_sms - launch.spare)
        self.grid = (max(1, min(lanes + room * columns, programs)), 1, 1)
        self.num_words = room * self.world.num_ranks * columns
        blocking.Blocking(*launch.tile, PLAIN_WARPS, PLAIN_STAGES).check(
            launch.kernel, plan.buffers[weights].dtype, plan.buffers[weights].dtype, False,
            self.world.target,
        )  # fmt: skip

    def _lanes(self, plan: SizedPlan) -> int:
        """Programs that feed: each has a word."""
        found = [plan.channels[name].chunks for name in self.launch.awaits]
        return next((one for one in found if isinstance(one, int)), 0)

    def start(
        self, bound: Mapping[str, Any], words: Mapping[str, torch.Tensor], slot: Any, split: Any
    ) -> Start:
        arguments = [
            words[one.name] if one.sort == "signals"
            else self._tables(bound) if one.sort == "tables" else bound[one.name]
            for one in self.kernel.of(core.Param) if one.sort not in ("slot", "world")
        ]  # fmt: skip
        stride_b = self.k if self.b_is_nk else self.n
        shape = gemm.Shape(self.slots, self.n, self.k, self.k, stride_b, self.n)
        tile = gemm.Tile.of(*self.launch.tile, size_k=self.k, b_is_nk=self.b_is_nk)
        given = (*arguments, slot.arg, shape, self.experts, tile.as_constexpr(), self.world.arg)
        options = {"num_warps": PLAIN_WARPS, "num_stages": PLAIN_STAGES}
        return Start(self.function, self.grid, given, options)

    def _tables(self, bound: Mapping[str, Any]) -> Tables:
        """Those of the call; before the router has run, for loading, any of their dtypes."""
        if self.table in bound:
            return Tables.of(bound[self.table])
        device = self.world.device
        return Tables(*[
            torch.zeros(4, dtype=torch.float32 if name == "weight_of" else torch.int32,
                        device=device)
            for name in Tables._fields
        ])  # fmt: skip
