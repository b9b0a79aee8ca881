"""Launches of products grouped by a router's tables: the same path in plans and in operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch

from weft.base.parts import full_part
from weft.compiler import layouts
from weft.compiler.lower import source
from weft.ir import core
from weft.ir.device import Do, Launch
from weft.plan.launches import KernelLaunch, Start, block_of_b
from weft.plan.product_launches import PLAIN_STAGES, PLAIN_WARPS
from weft.plan.sizes import SizedPlan
from weft.tiles import blocking, gemm, gemm_sm90, route, tile_scheduler
from weft.tiles.hooks.table import Experts, Tables


class Sizes(NamedTuple):
    """m tokens over all ranks, `rows` to each, top_k of `experts` for each token; B is [k, n] of
    each expert, or [n, k]; tiles have up to tile_m slots."""

    m: int
    rows: int
    n: int
    k: int
    experts: int
    top_k: int
    tile_m: int
    b_is_nk: bool


@dataclass(frozen=True)
class Schedule:
    """How a grouped product is done.

    Units   group_m: tiles that share columns of B in L2
    """

    transport: str = "sm_push"
    template: str = "plain"
    tile_n: int = 128
    tile_k: int = 64
    group_m: int = 4
    num_warps: int = 8
    num_stages: int = 3

    def tile(self, sized: Any, is_sm90: bool) -> gemm.Tile:
        """The generic template takes a power of two of columns. A rank may have other tiles than
        its peers: signals say which tokens are there, not which tiles."""
        columns = self.tile_n if is_sm90 else gemm_sm90.wide_columns(self.tile_n)
        sizes = (sized.tile_m, columns, self.tile_k)
        return gemm.Tile.of(*sizes, size_k=sized.k, b_is_nk=sized.b_is_nk)

    def options(self, is_sm90: bool) -> dict[str, int]:
        if is_sm90:
            return {"num_warps": self.num_warps}
        # The generic kernel of a schedule for Hopper, where addresses are not TMA's.
        stages = self.num_stages if self.template == "plain" else PLAIN_STAGES
        return {"num_warps": self.num_warps, "num_stages": stages}


def shape_of(sized: Any) -> gemm.Shape:
    n, k = sized.n, sized.k
    return gemm.Shape(sized.m * sized.top_k, n, k, k, k if sized.b_is_nk else n, n)


class GroupedProduct(KernelLaunch):
    """A launch of the GEMM template by tables. `sized` says what Sizes does.

    `channels` words of each rank say that its tokens are there; where the kernel sends them itself,
    as many communication CTAs store them before they multiply. `spare` SMs are left to others.
    """

    def __init__(
        self, world: Any, kernel: core.Kernel, sized: Any, schedule: Schedule, *, channels: int = 0,
        spare: int = 0,
    ) -> None:  # fmt: skip
        self.world, self.kernel, self.sized, self.schedule = world, kernel, sized, schedule
        self.variants, self.n = source.load(kernel), sized.n
        room = route.most_tiles(sized.m * sized.top_k, sized.experts, sized.tile_m)
        columns = ceil(sized.n / schedule.tile_n)
        self.experts = Experts(
            sized.m, sized.rows, sized.top_k, room, columns, schedule.group_m, channels
        )
        self.num_words = room * world.num_ranks * columns
        programs, tiles = max(1, world.target.num_sms - spare), room * columns
        if any(one.slot == "begin" for one in kernel.of(core.Hook)):
            tiles += channels
        if schedule.template == "sm90":
            tiles = programs
            elements = tile_scheduler.partial_elements(sized.tile_m, schedule.tile_n, programs)
            self.buffers = {"sums": ((elements,), torch.float32)}
            self.signals = {"summed": (tile_scheduler.partial_words(programs), torch.int64)}
        self.grid = (max(1, min(tiles, programs)), 1, 1)
        # By whether the template for Hopper runs.
        self._tiles = [schedule.tile(sized, is_sm90) for is_sm90 in (False, True)]

    @classmethod
    def of(
        cls, plan: SizedPlan, launch: Launch, kernel: core.Kernel, tensors: Mapping[str, Any]
    ) -> GroupedProduct:
        """That of a plan, by the generic template."""
        product: Do = next(do for do in launch.body if do.kind == "grouped_matmul")
        _, weights, table = product.operands
        m, top_k, experts = plan.shape(table)
        _, k, n = plan.shape(weights)
        b_is_nk, world = layouts.is_nk(tensors[weights]), plan.world
        for name in (name for name in launch.reads if name in tensors):
            given = tensors[name].mT if name == weights and b_is_nk else tensors[name]
            layouts.check_tensor(launch.kernel, name, given, world)
        cut = blocking.Blocking(*launch.tile, PLAIN_WARPS, PLAIN_STAGES)
        dtype = plan.buffers[weights].dtype
        cut.check(launch.kernel, dtype, dtype, False, world.target)
        # Words of a channel that tokens are announced on.
        words = [plan.channels[name].chunks for name in launch.awaits]
        made = cls(
            world, kernel,
            Sizes(m, full_part(m, world.num_ranks), n, k, experts, top_k, cut.tile_m, b_is_nk),
            Schedule(
                tile_n=cut.tile_n, tile_k=cut.tile_k, num_warps=PLAIN_WARPS,
                num_stages=PLAIN_STAGES,
            ),
            channels=next((one for one in words if isinstance(one, int)), 0), spare=launch.spare,
        )  # fmt: skip
        made.launch = launch
        return made

    def start(
        self, bound: Mapping[str, Any], words: Mapping[str, Any], slot: Any, split: Any = ()
    ) -> Start:
        is_sm90 = self.schedule.template == "sm90" and self._is_aligned(bound)
        arguments = [
            words[one.name] if one.sort == "signals"
            else self._tables(bound, one.name) if one.sort == "tables"
            else self._described(bound[one.name]) if one.sort == "operand" and is_sm90
            else bound[one.name]
            for one in self.kernel.of(core.Param) if one.sort not in ("slot", "world")
        ]  # fmt: skip
        sizes, tile = (shape_of(self.sized), self.experts), self._tiles[is_sm90]
        options = self.schedule.options(is_sm90)
        if is_sm90:
            cut = (tile.m, tile.n, tile.k, self.schedule.num_stages, tile.b_is_nk)
            first = self.variants.arranged(arguments, ())
            given = (*first, slot.sums, slot.summed, slot.arg, *sizes, None, self.world.arg, *cut)
            return Start(self.variants.sm90, self.grid, given, options)
        first = self.variants.arranged(arguments)
        given = (*first, slot.arg, *sizes, None, tile.as_constexpr(), self.world.arg)
        return Start(self.variants.plain, self.grid, given, options)

    def _is_aligned(self, bound: Mapping[str, Any]) -> bool:
        """Kernels for Hopper read B by TMA, and move 16 bytes of the others at once."""
        params = (one for one in self.kernel.of(core.Param) if one.sort in ("pointer", "operand"))
        return blocking.are_aligned(*(bound[one.name] for one in params))

    def _described(self, b: torch.Tensor) -> Any:
        """All experts' B, one behind the other, as TMA reads it."""
        b_is_nk, schedule = self.sized.b_is_nk, self.schedule
        rows = (b.mT if b_is_nk else b).reshape(-1, self.sized.k if b_is_nk else self.n)
        block = block_of_b(schedule.tile_n, schedule.tile_k, b_is_nk, True)
        return gemm_sm90.descriptor(rows, block)

    def _tables(self, bound: Mapping[str, Any], name: str) -> Tables:
        """Those of the call; before the router has run, for loading, any of their dtypes."""
        if name in bound:
            return Tables.of(bound[name])
        device = self.world.device
        return Tables(*[
            torch.zeros(4, dtype=torch.float32 if name == "weight_of" else torch.int32,
                        device=device)
            for name in Tables._fields
        ])  # fmt: skip
