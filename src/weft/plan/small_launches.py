"""Launches of a product for small m: its tiles are summed over ranks by packets, or packets bring
the rows."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch

from weft.base.parts import full_part
from weft.compiler import layouts
from weft.ir.device import Launch
from weft.ir.schedule import Schedule
from weft.plan import launches, vectors
from weft.plan.launches import KernelLaunch, Start
from weft.plan.sizes import SizedPlan
from weft.tiles import blocking, gathered_gemm, gemm, gemm_packets, gemm_small, mailboxes
from weft.tiles.move import Shards

WARPS, STAGES = 4, 4
# Programs on the emulator.
MOST_EMULATED = 3
# Packets for a program and rank in one step, at most: what its threads hold at a time.
MOST_PACKETS = 512


class _Small(KernelLaunch):
    """What both kinds have alike. Results leave by TMA where `stores_tiles`."""

    stores_tiles: bool

    def __init__(
        self, plan: SizedPlan, launch: Launch, tensors: Mapping[str, Any],
        schedule: Schedule | None = None,
    ) -> None:  # fmt: skip
        self.launch, self.world, self.tile = launch, plan.world, launch.tile
        self.left, self.right = next(x for x in launch.body if x.kind == "matmul").operands
        (self.m, self.k), self.n = plan.shape(self.left), plan.shape(self.right)[1]
        lies = layouts.rows_of(tensors[self.right]) if self.right in tensors else None
        self.b_is_nk, self.stride_b = lies or layouts.Rows(False, self.n)
        cut = (*self.tile, 1)
        self.schedule = one = schedule or Schedule("ll", "plain", 1, *cut, WARPS, STAGES)
        target, dtype = plan.world.target, plan.buffers[self.left].dtype
        out_dtype = plan.buffers[launch.writes[0]].dtype
        self.itemsize = getattr(torch, dtype).itemsize
        out_itemsize = getattr(torch, out_dtype).itemsize
        can_use_tma = launches.can_use_tma(self, self.itemsize, target, out_itemsize)
        self.tma = one.tma and can_use_tma
        self.num_tiles = ceil(self.m / self.tile[0]) * ceil(self.n / self.tile[1])
        blocking_of = blocking.Blocking(*self.tile, one.num_warps, one.num_stages)
        programs = programs_of(
            blocking_of, self.num_tiles, ceil(self.k / self.tile[2]), dtype, out_dtype,
            self.tma and self.stores_tiles, target,
        )  # fmt: skip
        self.grid = (programs, 1, 1)
        elements = gemm_small.partial_elements(*self.tile[:2], programs)
        self.sums, self.come = f"{launch.kernel}_sums", f"{launch.kernel}_come"
        self.buffers = {self.sums: ((elements,), torch.float32)}
        self.signals = {self.come: (self.num_tiles, torch.int32)}

    def _can_use_tma(self, *tensors: torch.Tensor) -> bool:
        row_bytes = self.stride_b * self.itemsize
        return self.tma and blocking.are_aligned(*tensors) and row_bytes % blocking.TMA_BYTES == 0

    def _shape(self) -> gemm.Shape:
        return launches.shape_of(self)._replace(stride_b=self.stride_b)

    def _tile(self, tma: bool) -> gemm.Tile:
        tile = gemm.Tile.of(*self.tile, size_k=self.k, b_is_nk=self.b_is_nk, tma=tma)
        return tile.as_constexpr()

    def _options(self) -> dict[str, int]:
        return {"num_warps": self.schedule.num_warps, "num_stages": self.schedule.num_stages}


def programs_of(
    cut: blocking.Blocking, tiles: int, num_k: int, dtype: str, out_dtype: str, tma: bool,
    target: Any,
) -> int:  # fmt: skip
    """Up to as many as are resident at once, two to an SM where they fit."""
    most = gemm_small.most_resident(cut, dtype, out_dtype, tma, target)
    if target.backend == "emu":
        return min(tiles * num_k, most, MOST_EMULATED)
    return gemm_small.programs_for(tiles, num_k, most)


class SmallProduct(_Small):
    """A launch of tiles/gemm_packets.py at given sizes, as its schedule says."""

    stores_tiles = False  # tiles leave as packets

    def __init__(
        self, plan: SizedPlan, launch: Launch, tensors: Mapping[str, Any],
        schedule: Schedule | None = None,
    ) -> None:  # fmt: skip
        super().__init__(plan, launch, tensors, schedule)
        tile_m, tile_n, _ = self.tile
        tiles, ranks = self.num_tiles, plan.world.num_ranks
        self.two_shot = len(launch.pushes) > 1
        # Where no step waits for credits nobody need be told.
        self.end = ("finish" if plan.facts.is_credited else "advance") if launch.gives else ""
        size = gemm_packets.packets_of(tile_m, tile_n, self.itemsize)
        self.half = gemm_packets.num_boxes(tiles, ranks, self.two_shot) * size
        # Calls that share words agree on who writes each, and on nothing else that they hold.
        self.words = f"{launch.pushes[0]}_{len(launch.pushes)}_{tiles}x{size}"
        self.packets = dict.fromkeys(launch.pushes, self.words)
        self.signals[self.words] = (2 * self.half, torch.int64)

    def start(
        self, bound: Mapping[str, torch.Tensor], words: Mapping[str, torch.Tensor], slot: Any,
        split: Any,
    ) -> Start:  # fmt: skip
        left, right, out = (bound[x] for x in (self.left, self.right, self.launch.writes[0]))
        tma = self._can_use_tma(left, right, out)
        tile_m, tile_n, tile_k = self.tile
        if tma:
            left = blocking.descriptor(left, (tile_m, tile_k))
            right = launches.describe_b(right, tile_n, tile_k, self.b_is_nk, False)
        given = (
            left, right, out, getattr(slot, self.words), getattr(slot, self.sums),
            getattr(slot, self.come), slot.arg, self._shape(), self.half, self._tile(tma),
            self.world.arg, self.two_shot, self.end,
        )  # fmt: skip
        return Start(gemm_packets.gemm_packets, self.grid, given, self._options())


class GatheredProduct(_Small):
    """A launch of tiles/gathered_gemm.py: packets bring the rows of `launch.body[0]`."""

    stores_tiles = True

    def __init__(
        self, plan: SizedPlan, launch: Launch, tensors: Mapping[str, Any],
        schedule: Schedule | None = None,
    ) -> None:  # fmt: skip
        super().__init__(plan, launch, tensors, schedule)
        (self.own,) = launch.body[0].operands
        (programs, _, _), ranks = self.grid, plan.world.num_ranks
        self.row_bytes = self.k * self.itemsize
        rows = full_part(self.m, ranks)
        # Of as many rows as fill the tiles: one kernel for all m of a tile.
        most = full_part(ceil(self.m / self.tile[0]) * self.tile[0], ranks)
        self.block = packets_of(most * self.row_bytes, programs)
        self.shards = Shards(self.m * self.row_bytes, rows * self.row_bytes)
        self.sources = vectors.power_of_two(ranks)
        # Calls that share them agree on programs and packets, and so on what each word is.
        of = f"{programs}x{self.block}"
        names = [f"{launch.kernel}_{one}_{of}" for one in ("words", "steps", "calls", "unpacked")]
        self._counts = names
        self.packets = {self.left: names[0]}
        self.rows = f"{launch.kernel}_rows"
        dtype = getattr(torch, plan.buffers[self.left].dtype)
        self.buffers[self.rows] = ((self.m, self.k), dtype)
        words = programs * mailboxes.PACKET_DEPTH.value * ranks * self.block
        for name, count in zip(names, (words, programs, programs, 1), strict=True):
            self.signals[name] = (count, torch.int64)

    def start(
        self, bound: Mapping[str, torch.Tensor], words: Mapping[str, torch.Tensor], slot: Any,
        split: Any,
    ) -> Start:  # fmt: skip
        own, right, out = (bound[x] for x in (self.own, self.right, self.launch.writes[0]))
        gathered, counts = getattr(slot, self.rows), [getattr(slot, x) for x in self._counts]
        # Of a call's own tensors: the slot's begin anywhere at 256 bytes.
        tma = self._can_use_tma(own, right, out)
        width = min(vectors.PACKET_BYTES, vectors.width_of(self.row_bytes, own, gathered))
        mine, whole = vectors.as_words(width, own, gathered)
        left, (tile_m, tile_n, tile_k) = gathered, self.tile
        if tma:
            left = blocking.descriptor(gathered, (tile_m, tile_k))
            right = launches.describe_b(right, tile_n, tile_k, self.b_is_nk, False)
            out = blocking.descriptor(out, (tile_m, tile_n))
        given = (
            mine, whole, left, right, out, *counts, getattr(slot, self.sums),
            getattr(slot, self.come), self._shape(), self.shards, self._tile(tma), self.world.arg,
            width, self.sources, self.block,
        )  # fmt: skip
        return Start(gathered_gemm.gathered_gemm, self.grid, given, self._options())


def packets_of(shard_bytes: int, programs: int) -> int:
    """Packets of a program for each rank at a time."""
    packets = ceil(ceil(shard_bytes / vectors.PACKET_BYTES) / programs)
    return min(MOST_PACKETS, max(16, vectors.power_of_two(packets)))
