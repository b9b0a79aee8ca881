"""Launches of products grouped by a router's tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

import torch

from weft.base.dtypes import DTYPES
from weft.base.parts import full_part
from weft.base.target import Target
from weft.compiler import layouts
from weft.compiler.lower import signature, source
from weft.ir import core
from weft.ir.device import Do, Launch
from weft.ir.schedule import Schedule
from weft.plan.launches import (
    REGISTERS_OF_THREAD,
    THREADS_OF_SM,
    KernelLaunch,
    Start,
    block_of_b,
    tables_in,
)
from weft.plan.product_launches import PLAIN_STAGES, PLAIN_WARPS
from weft.plan.sizes import SizedPlan
from weft.tiles import (
    blocking,
    descriptors_sm90,
    gemm,
    multiply_sm90,
    route,
    tile_scheduler,
)
from weft.tiles.blocking import Blocking
from weft.tiles.hooks.table import Experts

# Tiles that share columns of B in L2.
GROUP_M = 4


def together(cut: Blocking, itemsize: int, target: Target) -> int:
    """Programs on an SM: where experts have few rows a tile is a wait for its matrix, and others'
    are read meanwhile."""
    if target.backend != "cuda":
        return 1
    shared = cut.num_stages * (cut.tile_m + cut.tile_n) * cut.tile_k * itemsize
    threads = cut.num_warps * target.warp_size
    return max(1, min(target.shared_bytes // shared, THREADS_OF_SM // threads))


def staged(cut: Blocking, k: int, itemsize: int, target: Target) -> Blocking:
    """The same in as many stages as keep the most of B under way on an SM, up to those of `cut`: of
    fewer more programs fit, and of short k no more are ever filled."""
    if target.backend != "cuda":
        return cut
    steps = max(2, ceil(k / cut.tile_k))
    ways = [replace(cut, num_stages=one) for one in range(2, min(cut.num_stages, steps) + 1)]

    def under_way(one: Blocking) -> tuple[int, int]:
        programs = together(one, itemsize, target)
        return programs * (one.num_stages - 1), programs

    return max(ways, key=under_way, default=cut)


class GroupedProduct(KernelLaunch):
    """A launch of the GEMM template by tables.

    A channel's words of each rank say that its tokens are there; where the kernel sends them
    itself, as many communication CTAs store them before they multiply. Beside a kernel that relays
    them each program has an SM for itself, so that the relay's find room on the others.
    """

    def __init__(
        self, plan: SizedPlan, launch: Launch, kernel: core.Kernel, tensors: Mapping[str, Any],
        schedule: Schedule | None = None,
    ) -> None:  # fmt: skip
        self.launch, self.world, self.kernel = launch, plan.world, kernel
        self.variants = source.load(kernel)
        product: Do = next(do for do in launch.body if do.kind == "grouped_matmul")
        _, weights, table = product.operands
        self._weights = weights
        m, top_k, _ = plan.shape(table)
        # Where experts are split, those of the rank that has the most; of columns or k own ones.
        (experts, *_), (_, self.k, self.n) = plan.shape(weights, 0), plan.shape(weights)
        self.b_is_nk, target = layouts.is_nk(tensors[weights]), self.world.target
        if schedule is None:
            for name in (one for one in launch.reads if one in tensors):
                given = tensors[name].mT if name == weights and self.b_is_nk else tensors[name]
                layouts.check_tensor(launch.kernel, name, given, self.world)
            cut = Blocking(*launch.tile, PLAIN_WARPS, PLAIN_STAGES)
            dtype = plan.buffers[weights].dtype
            cut.check(launch.kernel, dtype, dtype, False, target)
            schedule = Schedule("", "plain", 1, *launch.tile, GROUP_M, PLAIN_WARPS, PLAIN_STAGES)
        self.schedule = schedule
        tile_m, tile_n, tile_k = schedule.tile
        ranks, room = self.world.num_ranks, route.most_tiles(m * top_k, experts, tile_m)
        columns = ceil(self.n / tile_n)
        words = [plan.channels[name].chunks for name in launch.awaits]
        chunks = next((one for one in words if isinstance(one, int)), 0)
        self.experts = Experts(
            m, full_part(m, ranks), top_k, room, columns, schedule.group_m, chunks
        )  # fmt: skip
        self.axes = ("tile", room), ("from rank", ranks), ("tile column", columns)
        programs, tiles = max(1, target.num_sms - launch.spare), room * columns
        itemsize = DTYPES[plan.buffers[weights].dtype].itemsize
        self._options = {"num_warps": schedule.num_warps}
        if schedule.template != "sm90":
            cut = Blocking(*schedule.tile, schedule.num_warps, schedule.num_stages)
            on_sm = 1 if launch.spare else together(cut, itemsize, target)
            self._options["num_stages"] = schedule.num_stages
            if on_sm > 1:
                programs *= on_sm
                self._options["maxnreg"] = REGISTERS_OF_THREAD
        if any(one.slot == "begin" for one in kernel.of(core.Hook)):
            tiles += chunks
        if schedule.template == "sm90":
            tiles = programs
            elements = tile_scheduler.partial_elements(tile_m, tile_n, programs)
            self.buffers = {f"{launch.kernel}_sums": ((elements,), torch.float32)}
            # And two words by which programs keep pace.
            words = tile_scheduler.partial_flags(programs) + 2
            self.signals = {f"{launch.kernel}_summed": (words, torch.int64)}
        self.grid = (max(1, min(tiles, programs)), 1, 1)
        # By whether the template for Hopper runs; the generic one takes a power of two of columns.
        # A rank may have other tiles than its peers: signals say which tokens are there.
        cuts = [(tile_m, width, tile_k) for width in (multiply_sm90.wide_columns(tile_n), tile_n)]
        self._tiles = [gemm.Tile.of(*cut, size_k=self.k, b_is_nk=self.b_is_nk) for cut in cuts]
        stride = self.k if self.b_is_nk else self.n
        self._shape = gemm.Shape(m * top_k, self.n, self.k, self.k, stride, self.n)

    def start(
        self, bound: Mapping[str, Any], words: Mapping[str, Any], slot: Any, split: Any = ()
    ) -> Start:
        schedule = self.schedule
        is_sm90 = schedule.template == "sm90" and self._is_aligned(bound)
        arguments = [
            words[one.name] if one.sort == "signals"
            else tables_in(bound, one.name, self.world) if one.sort == "tables"
            else self._described(one.name, bound[one.name]) if one.sort == "operand" and is_sm90
            else bound[one.name]
            for one in self.kernel.of(core.Param) if one.sort not in ("slot", "world")
        ]  # fmt: skip
        sizes, tile = (self._shape, self.experts), self._tiles[is_sm90]
        options, block = self._options, signature.PUSHED
        if is_sm90:
            cut = (tile.m, tile.n, tile.k, schedule.num_stages, tile.b_is_nk)
            name = self.launch.kernel
            shared = (getattr(slot, f"{name}_sums"), getattr(slot, f"{name}_summed"))
            first = self.variants.arranged(arguments, ())
            given = (*first, *shared, slot.arg, *sizes, None, self.world.arg, *cut, block)
            return Start(self.variants.sm90, self.grid, given, options)
        if schedule.template == "sm90":  # where addresses are not TMA's
            options = {**options, "num_stages": PLAIN_STAGES}
        first = self.variants.arranged(arguments)
        given = (*first, slot.arg, *sizes, None, tile.as_constexpr(), self.world.arg, block)
        return Start(self.variants.plain, self.grid, given, options)

    def _is_aligned(self, bound: Mapping[str, Any]) -> bool:
        """Kernels for Hopper read B by TMA, and move 16 bytes of the others at once."""
        params = (one for one in self.kernel.of(core.Param) if one.sort in ("pointer", "operand"))
        if not bound[self._weights].numel():  # a rank without experts, of which TMA reads none
            return False
        return blocking.are_aligned(*(bound[one.name] for one in params))

    def _described(self, name: str, b: torch.Tensor) -> Any:
        """Rows by slot, or all experts' B, one behind the other, as TMA reads them."""
        tile = self._tiles[True]
        if name != self._weights:
            return descriptors_sm90.descriptor(b, (tile.m, tile.k))
        rows = (b.mT if tile.b_is_nk else b).reshape(-1, self.k if tile.b_is_nk else self.n)
        return descriptors_sm90.descriptor(rows, block_of_b(tile.n, tile.k, tile.b_is_nk, True))
