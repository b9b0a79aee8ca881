"""Launches of a product that sums over the rows of all ranks: the gradient of a weight."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch

from weft.base.parts import full_part
from weft.compiler import gather_schedules
from weft.compiler.lower import compose, source
from weft.ir import core
from weft.ir.device import Launch
from weft.ir.schedule import PUSHERS, Schedule
from weft.plan.launches import KernelLaunch, Start
from weft.plan.product_launches import PLAIN_STAGES, PLAIN_WARPS, block_of
from weft.plan.sizes import SizedPlan
from weft.tiles import blocking, gemm
from weft.tiles.hooks.split_k import Turns


class SummedOverRows(KernelLaunch):
    """A launch of the GEMM template at given sizes: x^T @ y, of which one is gathered."""

    def __init__(
        self, plan: SizedPlan, launch: Launch, kernel: core.Kernel,
        schedule: Schedule | None = None,
    ) -> None:  # fmt: skip
        self.launch, self.world, self.kernel = launch, plan.world, kernel
        self.variants = source.load(kernel)
        target, ranks = plan.world.target, plan.world.num_ranks
        left, right = next(one for one in launch.body if one.kind == "matmul_tn").operands
        (rows, self.m), self.n = plan.shape(left), plan.shape(right)[1]
        dtypes = [getattr(torch, plan.buffers[name].dtype) for name in (left, launch.writes[0])]
        itemsize, out_itemsize = (one.itemsize for one in dtypes)
        (self._channel,) = [one for one in plan.channels.values()
                            if one.own and one.buffer in (left, right)]  # fmt: skip
        chunks, programs = self._channel.chunks, max(1, target.num_sms - launch.spare)
        assert isinstance(chunks, int)
        tiles = ceil(self.m / launch.tile[0]), ceil(self.n / launch.tile[1])
        num_tiles, is_pushed = tiles[0] * tiles[1], bool(launch.pushes)
        if schedule is None:
            pushers = min(PUSHERS, programs) if is_pushed else 0
            splits = gather_schedules.splits_of(num_tiles, ranks * chunks, programs - pushers)
            schedule = Schedule(
                "", "plain", 1, *launch.tile, num_warps=PLAIN_WARPS, num_stages=PLAIN_STAGES,
                pushers=pushers, split_k=splits,
            )  # fmt: skip
        self.schedule = one = schedule
        pushers = min(one.pushers, programs) if is_pushed else 0
        self.grid = (max(1, min(num_tiles * one.split_k + pushers, programs)), 1, 1)
        # Do all segments divide by tile_k?
        shard = full_part(rows, ranks)
        is_even = rows == shard * ranks and shard % one.tile_k == 0
        row_bytes = [self.m * itemsize, self.n * itemsize, self.n * out_itemsize]
        self.tma = one.tma and is_even and blocking.can_use_tma(target, row_bytes)
        self._tiles = [gemm.Tile(*one.tile, False, tma, is_even).as_constexpr()
                       for tma in (False, True)]  # fmt: skip
        # Of k it is the gathered rows' columns, which communication CTAs ask for.
        columns = self.m if self._channel.buffer == left else self.n
        self._shape = gemm.Shape(self.m, self.n, columns, self.m, self.n, self.n)
        pieces = ceil(pushers / (max(1, ranks - 1) * chunks))
        self._turns = Turns(one.group_m, one.split_k, pushers, pieces, num_tiles, tiles[1],
                            None, None)  # fmt: skip
        is_wide = columns * itemsize % blocking.TMA_BYTES == 0
        self._block = block_of(one.num_warps, itemsize, is_wide, target)
        name = launch.kernel
        self._fed, self._partials, self._summed = (
            f"{name}_{one}" for one in ("fed", "partials", "summed")
        )
        if is_pushed:
            self.signals = {self._fed: (ranks * chunks, torch.int32)}
        if one.split_k > 1:
            kept = (one.split_k - 1) * num_tiles
            self.buffers = {self._partials: ((kept * one.tile_m * one.tile_n,), torch.float32)}
            self.signals = {**self.signals, self._summed: (kept, torch.int64)}

    def start(
        self, bound: Mapping[str, torch.Tensor], words: Mapping[str, torch.Tensor], slot: Any,
        split: Any,
    ) -> Start:  # fmt: skip
        rows, one = self._channel.buffer, self.schedule
        known = {**bound, **words, f"{rows}_ptr": bound[rows]}
        known[f"{self._channel.own}_ptr"] = bound[self._channel.own]
        if self.launch.pushes:
            known[f"{rows}_fed"] = getattr(slot, self._fed)
        params = [x for x in self.kernel.of(core.Param) if x.sort not in ("slot", "world")]
        operands = [x.name for x in params if x.sort == "operand"]
        tma = self.tma and blocking.are_aligned(*(bound[name] for name in operands))
        if tma:
            for name in operands:
                block = compose.summed_block(self.kernel, name, one.tile)
                is_result = name == operands[-1]
                known[name] = blocking.descriptor(bound[name], one.tile[:2] if is_result else block)
        turns = self._turns
        if one.split_k > 1:
            turns = turns._replace(partials=getattr(slot, self._partials),
                                   summed=getattr(slot, self._summed))  # fmt: skip
        arguments = (
            *self.variants.arranged([known[x.name] for x in params]), slot.arg, self._shape,
            # Own rows are read in place: communication CTAs store none of them here.
            split._replace(tile_rows=1), turns, self._tiles[tma], self.world.arg, self._block,
        )  # fmt: skip
        options = {"num_warps": one.num_warps, "num_stages": one.num_stages}
        return Start(self.variants.plain, self.grid, arguments, options)
