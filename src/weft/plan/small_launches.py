"""Launches of a product for small m whose tiles are summed over ranks by packets."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch

from weft.compiler import layouts
from weft.ir.device import Launch
from weft.ir.schedule import Schedule
from weft.plan import launches
from weft.plan.launches import KernelLaunch, Start
from weft.plan.sizes import SizedPlan
from weft.tiles import blocking, gemm, gemm_packets, gemm_small

WARPS, STAGES = 4, 4
# Programs on the emulator.
MOST_EMULATED = 3


class SmallProduct(KernelLaunch):
    """A launch of tiles/gemm_packets.py at given sizes, as its schedule says."""

    def __init__(
        self, plan: SizedPlan, launch: Launch, tensors: Mapping[str, Any],
        schedule: Schedule | None = None,
    ) -> None:  # fmt: skip
        self.launch, self.world, self.tile = launch, plan.world, launch.tile
        self.left, self.right = launch.body[0].operands
        (self.m, self.k), self.n = plan.shape(self.left), plan.shape(self.right)[1]
        lies = layouts.rows_of(tensors[self.right]) if self.right in tensors else None
        self.b_is_nk, self.stride_b = lies or layouts.Rows(False, self.n)
        cut = (*self.tile, 1)
        self.schedule = schedule or Schedule("ll", "plain", 1, *cut, WARPS, STAGES)
        target, dtype = plan.world.target, plan.buffers[launch.writes[0]].dtype
        self.itemsize = getattr(torch, dtype).itemsize
        self.tma = self.schedule.tma and launches.can_use_tma(self, self.itemsize, target)
        tile_m, tile_n, tile_k = self.tile
        tiles, ranks = ceil(self.m / tile_m) * ceil(self.n / tile_n), plan.world.num_ranks
        self.grid = (self._programs(tiles, ceil(self.k / tile_k), dtype), 1, 1)
        self.two_shot = len(launch.pushes) > 1
        # Where no step waits for credits nobody need be told.
        is_credited = any(getattr(step, "takes", False) for step in plan.plan.steps)
        self.end = ("finish" if is_credited else "advance") if launch.gives else ""
        size = gemm_packets.packets_of(tile_m, tile_n, self.itemsize)
        self.half = gemm_packets.num_boxes(tiles, ranks, self.two_shot) * size
        # Calls that share words agree on who writes each, and on nothing else that they hold.
        self.words = f"{launch.pushes[0]}_{len(launch.pushes)}_{tiles}x{size}"
        self.packets = dict.fromkeys(launch.pushes, self.words)
        sums = gemm_small.partial_elements(tile_m, tile_n, self.grid[0])
        self.sums, self.come = f"{launch.kernel}_sums", f"{launch.kernel}_come"
        self.buffers = {self.sums: ((sums,), torch.float32)}
        self.signals = {
            self.words: (2 * self.half, torch.int64), self.come: (tiles, torch.int32)
        }  # fmt: skip

    def _programs(self, tiles: int, num_k: int, dtype: str) -> int:
        """Up to as many as are resident at once, two to an SM where they fit."""
        target, one = self.world.target, self.schedule
        if target.backend == "emu":
            return min(tiles * num_k, target.num_sms, MOST_EMULATED)
        cut = blocking.Blocking(*self.tile, one.num_warps, one.num_stages)
        # Tiles leave as packets, not by TMA.
        most = gemm_small.most_resident(cut, dtype, dtype, False, target)
        return gemm_small.programs_for(tiles, num_k, most)

    def start(
        self, bound: Mapping[str, torch.Tensor], words: Mapping[str, torch.Tensor], slot: Any,
        split: Any,
    ) -> Start:  # fmt: skip
        left, right, out = (bound[x] for x in (self.left, self.right, self.launch.writes[0]))
        tma = self.tma and blocking.are_aligned(left, right, out)
        tma = tma and self.stride_b * self.itemsize % blocking.TMA_BYTES == 0
        tile_m, tile_n, tile_k = self.tile
        if tma:
            left = blocking.descriptor(left, (tile_m, tile_k))
            right = launches.describe_b(right, tile_n, tile_k, self.b_is_nk, False)
        shape = launches.shape_of(self)._replace(stride_b=self.stride_b)
        tile = gemm.Tile.of(*self.tile, size_k=self.k, b_is_nk=self.b_is_nk, tma=tma)
        given = (
            left, right, out, getattr(slot, self.words), getattr(slot, self.sums),
            getattr(slot, self.come), slot.arg, shape, self.half, tile.as_constexpr(),
            self.world.arg, self.two_shot, self.end,
        )  # fmt: skip
        options = {"num_warps": self.schedule.num_warps, "num_stages": self.schedule.num_stages}
        return Start(gemm_packets.gemm_packets, self.grid, given, options)
