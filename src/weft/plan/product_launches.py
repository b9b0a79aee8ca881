"""Launches of the GEMM template in a plan: which form of the kernel, its operands, its grid."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import ceil
from operator import or_
from typing import Any

import torch

from weft.base.errors import ConfigError
from weft.base.fields import copied
from weft.base.parts import full_part, part_of
from weft.compiler import layouts, schedules
from weft.compiler.lower import compose, kernels, signature, source
from weft.ir import core
from weft.ir.device import Launch, puts_far, scales_of
from weft.ir.schedule import PUSHERS, Schedule
from weft.plan import launches, scales
from weft.plan.launches import KernelLaunch, Start
from weft.plan.sizes import SizedPlan
from weft.tiles import blocking, descriptors_sm90, gemm, gemm_sm90, multiply_sm90, tile_scheduler
from weft.tiles.hooks import whole
from weft.tiles.relay import groups_among

PLAIN_WARPS, PLAIN_STAGES = 8, 3
# What a communication CTA moves at a time on the emulator, so that several share the work, as on a
# GPU.
EMULATED_BLOCK = 1024

# Rows of tiles that share columns of B in L2.
MOST_GROUPED = 8


def block_of(num_warps: int, itemsize: int, is_even: bool, target: Any) -> int:
    """Elements that a program moves at a time, of rows that are even in 16 bytes or not: as many
    loads under way as registers hold, 128 bytes of a thread, or 16 elements alone."""
    if target.backend == "emu":
        return EMULATED_BLOCK
    return 32 * num_warps * (128 // itemsize if is_even else 16)


class Product(KernelLaunch):
    """A launch of the GEMM template at given sizes, as its schedule says."""

    def __init__(
        self, plan: SizedPlan, launch: Launch, kernel: core.Kernel, tensors: Mapping[str, Any],
        schedule: Schedule | None = None,
    ) -> None:  # fmt: skip
        self.launch, self.world, self.tile = launch, plan.world, launch.tile
        product = next(one for one in launch.body if one.kind == "matmul")
        left, right = product.operands
        self.left, self.right, self.scaling = left, right, product.scaling
        (mapping,) = kernel.of(core.Mapping)
        (self.m, self.k), self.n = plan.shape(left), plan.shape(right)[1]
        # Of the columns of each of its own rows a rank has as many as any other one in the end.
        self.is_exchange = launch.order == "exchange"
        # An input may lie otherwise than what kernels store, and padded.
        lies = layouts.rows_of(tensors[right]) if right in tensors else None
        self.b_is_nk, self.stride_b = lies or layouts.Rows(False, self.n)
        if self.is_exchange:
            self.m, self.n = plan.shape(launch.writes[0])
        self.itemsize, out_itemsize = (
            getattr(torch, plan.buffers[name].dtype).itemsize for name in (left, launch.writes[0])
        )
        # The generic variant has a power of two of columns.
        self.plain_tile = (self.tile[0], multiply_sm90.wide_columns(self.tile[1]), self.tile[2])
        # Where k comes in slices it is that of one, and m this rank's own rows.
        self.is_sliced = mapping.cuts == "slices"
        self.stride_a = self.k
        if self.is_sliced:
            self.k //= plan.world.num_ranks
        self.is_whole = mapping.cuts == "whole" or self.is_sliced
        # Of a part's columns, where engines carry them; of launches that have one each.
        carried = [plan.channels[one] for one in (*launch.announces, *launch.awaits)
                   if plan.channels[one].to == "engine" or launch.order == "own_part"]  # fmt: skip
        self.chunks = plan.chunks_of(carried[0]) if carried else 0
        self.pieces = self.chunks if launch.order == "own_part" else 0
        if launch.piece:
            self.pieces = launch.piece[1]
            self.n //= self.pieces
        target, extents = plan.world.target, max(self.plain_tile)
        can_use_tma = launches.can_use_tma(self, self.itemsize, target, out_itemsize)
        self.tma = can_use_tma and extents <= blocking.TMA_EXTENT
        if self.is_sliced:
            self.tma = self.tma and self.k % self.tile[2] == 0
        # The chunks of own rows that its communication CTAs store on each rank, if it has any.
        self.pushed = sum(plan.channels[name].chunks for name in launch.announces
                          if left in launch.pushes)  # fmt: skip
        puts = puts_far(plan.plan, launch)
        self.is_relayed = bool(launch.pushes) and not puts
        self._nodes, self._is_usual = plan.nodes if puts else (), schedule is None
        self.schedule = one = schedule or self._usual()
        self.tma, self.is_sm90 = self.tma and one.tma, one.template == "sm90"
        if not (self.is_sm90 or self.is_whole or self.tile == self.plain_tile):
            message = f"tile={self.tile} with template=plain on {target}"
            raise ConfigError(
                f"{launch.kernel}: {message}; tiles that ranks signal to each other have a "
                f"power of two of columns there: take {self.plain_tile}", place=launch.place,
            )  # fmt: skip
        self.groups = groups_among(plan.nodes)
        self.needs_aligned = self.is_sm90 and not self.is_whole and self.tile != self.plain_tile
        self.kernel = kernels.sending(kernel) if one.by_tma and self.is_sm90 else kernel
        self.variants = source.load(self.kernel)
        params = kernel.of(core.Param)
        self._operands = [one.name for one in params if one.sort == "operand"]
        self._params = [one for one in params if one.sort not in ("slot", "world")]
        # The buffer that a parameter is of: own_X are X's own rows, X_ptr its address; which ones
        # the generic variant takes by address.
        known = (*launch.reads, *launch.writes, *launch.pushes)
        self._homes = {
            one.name: one.name if one.name in known
            else one.name.removeprefix("own_").removesuffix("_ptr")
            for one in params
        }  # fmt: skip
        self._pointers = {
            one.name for one in params
            if one.sort == "pointer" or signature.leaves_by_pointers(self.kernel, one)
        }  # fmt: skip
        self._takes_groups = "groups" in [one.name for one in params]
        self._set_grid(target)

    def of(self, step: Launch) -> Product:
        return copied(self, launch=step)

    def at(self, sized: SizedPlan) -> Product:
        rows = sized.shape(self.launch.writes[0] if self.is_exchange else self.left)[0]
        found = copied(self, m=rows)
        if self._is_usual:
            found.schedule = found._usual()
        found._set_grid(self.world.target)
        return found

    @property
    def _rank_rows(self) -> int:
        if self.is_sliced:
            return max(1, self.m)
        return max(1, full_part(self.m, self.world.num_ranks))

    def _usual(self) -> Schedule:
        """The schedule of a launch for which nobody says another."""
        target, ranks, (tile_m, tile_n, tile_k) = self.world.target, self.world.num_ranks, self.tile
        is_hopper = launches.is_for_hopper(self.itemsize, self._nodes, target)
        is_sm90 = is_hopper and self.tma and gemm_sm90.has_tile(self.tile)
        # What the last own tiles of an all-reduce sum is not hidden: few of them.
        last = 1 if self.launch.body[-1].kind == "all_reduce" else launches.LAST
        if self.is_whole:
            group_m = max(1, min(MOST_GROUPED, self._rank_rows // tile_m))
        else:
            # Programs of one turn are in one part's tiles where engines carry them.
            sharing = 1 if self.chunks or self.pieces else ranks
            group_m = schedules.group_m(sharing, ceil(self._rank_rows / tile_m))
        pushers = min(PUSHERS, target.num_sms - self.launch.spare) if self.pushed else 0
        cut = (tile_m, tile_n, tile_k, group_m)
        if is_sm90:
            stages = gemm_sm90.most_stages(*self.tile, target)
            return Schedule("", "sm90", last, *cut, gemm_sm90.NUM_WARPS, stages, pushers=pushers)
        return Schedule("", "plain", last, *cut, PLAIN_WARPS, PLAIN_STAGES, pushers=pushers)

    def _set_grid(self, target: Any) -> None:
        """Programs, and how rows are cut, as the kernel gets it."""
        tile_m, tile_n, _ = self.tile
        ranks, programs = self.world.num_ranks, max(1, target.num_sms - self.launch.spare)
        tiles_m = ceil(self._rank_rows / tile_m)
        rows_of_tiles = ceil(self.m / tile_m) if self.is_whole else ranks * tiles_m
        if self.pieces:
            rows_of_tiles = tiles_m * (ranks - 1 if self.launch.piece else 1)
        tiles = rows_of_tiles * ceil(self.n / tile_n)
        name, one = self.launch.fused, self.schedule
        pushers = min(one.pushers, programs) if self.pushed else 0
        grid = programs if self.is_sm90 else max(1, min(tiles + pushers, programs))
        self.grid = (grid, 1, 1)
        if self.is_sm90:
            elements = tile_scheduler.partial_elements(tile_m, tile_n, grid, one.first_wave)
            self.buffers = {f"{name}_sums": ((elements,), torch.float32)}
            words = tile_scheduler.partial_flags(grid, one.first_wave) * (1 + self.pieces)
            self.signals = {f"{name}_summed": (words, torch.int64)}
        if self.pushed:
            self.signals = {**self.signals, self._fed: (ranks * self.pushed, torch.int32)}
        self.turns = whole.Turns(
            one.group_m, schedules.head_of(self.m, self._rank_rows, tile_m, one.own_first),
            one.first_wave, pushers, ceil(pushers / max(1, (ranks - 1) * self.pushed)),
        ) if self.is_whole else None  # fmt: skip
        # A relay takes other nodes' tiles in an order of its own: own ones, which wait for relays,
        # come behind all of them, or two ranks' programs could wait for each other.
        # Those of own columns nobody waits for.
        last = tiles if self.is_relayed or self.is_exchange else one.last
        self.parts = launches.parts_of(
            self, self._rank_rows, ranks, (tile_m, tile_n), self.is_sm90, grid, last,
            self.schedule.group_m, max(1, self.chunks),
        )  # fmt: skip
        self.axes = (("tile row", self.parts.tiles_m), ("tile column", self.parts.num_n),
                     ("part", self.parts.words), ("from rank", ranks))  # fmt: skip

    def start(
        self, bound: Mapping[str, torch.Tensor], words: Mapping[str, torch.Tensor], slot: Any,
        split: Any,
    ) -> Start:  # fmt: skip
        shape = launches.shape_of(self)
        shape = shape._replace(stride_a=self.stride_a, stride_b=self.stride_b)
        addresses = [bound[self._homes[name]].data_ptr() for name in self._operands]
        aligned = reduce(or_, addresses) % 16 == 0
        # Of one rank's weight alone: the protocol between ranks must not depend on it.
        aligned = aligned and self.stride_b * self.itemsize % blocking.TMA_BYTES == 0
        is_sm90, tma = self.is_sm90 and aligned, self.tma and aligned
        given = {**words, **self._of_slot(slot, bound)}
        arguments = [
            given[one.name] if one.name in given else self._tensor(one, bound, is_sm90, tma)
            for one in self._params
        ]
        cut = (split if self.is_whole else self.parts, self.turns)
        block = self._block()
        name, extents = self.launch.fused, self.tile
        if is_sm90:
            stages = self.schedule.num_stages
            sums = (getattr(slot, f"{name}_sums"), self._summed(getattr(slot, f"{name}_summed")))
            rest = (self.world.arg, *extents, stages, self.b_is_nk, block)
            first = self.variants.arranged(arguments, self._peers(bound))
            given = (*first, *sums, slot.arg, shape, *cut, *rest)
            return Start(
                self.variants.sm90, self.grid, given, {"num_warps": self.schedule.num_warps}
            )
        tile = gemm.Tile.of(*self.plain_tile, size_k=self.k, b_is_nk=self.b_is_nk, tma=tma)
        tile = tile.as_constexpr()
        first = self.variants.arranged(arguments)
        given = (*first, slot.arg, shape, *cut, tile, self.world.arg, block)
        warps, stages = self.schedule.num_warps, self.schedule.num_stages
        if self.is_sm90:  # where addresses are not TMA's
            warps, stages = PLAIN_WARPS, PLAIN_STAGES
        options = {"num_warps": warps, "num_stages": stages}
        return Start(self.variants.plain, self.grid, given, options)

    def _summed(self, words: torch.Tensor) -> torch.Tensor:
        """Those of this launch: they hold the call's epoch, which is one for all launches of it."""
        if not self.pieces:
            return words
        place = self.launch.piece[0] if self.launch.piece else self.pieces
        each = tile_scheduler.partial_flags(self.grid[0], self.schedule.first_wave)
        return words[place * each : (place + 1) * each]

    @property
    def _fed(self) -> str:
        """Of the slot, how many pieces of a chunk communication CTAs have stored for a rank."""
        return f"{self.launch.kernel}_fed"

    def _of_slot(self, slot: Any, bound: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What the kernel is given beside the plan's buffers and channels, by its parameters."""
        found: dict[str, Any] = {}
        if self.pushed:
            found[f"{self.left}_fed"] = getattr(slot, self._fed)
        if self._takes_groups:
            found["groups"] = self.groups
        if self.scaling:
            theirs, of_right = (bound[scales_of(name)] for name in (self.left, self.right))
            found["apart"] = scales.apart_of(theirs, of_right, self.scaling)
        return found

    def _block(self) -> int:
        """Elements that a communication CTA moves at a time."""
        if self.is_sm90 or not self.pushed:
            return signature.PUSHED  # by four warps, whichever variant it is
        is_even = self.k * self.itemsize % blocking.TMA_BYTES == 0
        return block_of(self.schedule.num_warps, self.itemsize, is_even, self.world.target)

    def _peers(self, bound: Mapping[str, torch.Tensor]) -> list:
        """Descriptors of what tiles are sent to, on each peer by hop."""
        chunk, found = launches.chunk_of(*self.tile[:2], self.itemsize), []
        for name in compose.peers_of(self.kernel):
            found += launches.describe_peers(self.world, bound[name], self.parts, chunk)
        return found

    def _tensor(
        self, one: core.Param, bound: Mapping[str, torch.Tensor], is_sm90: bool, tma: bool
    ) -> Any:
        """A pointer, or a descriptor for the blocks in which the template reads or stores it."""
        tensor = bound[self._homes[one.name]]
        result = self.launch.writes[0]
        if self.launch.piece and one.name in (self.right, result):
            tensor = self._piece_of(tensor, one.name == result)
        if one.name == f"own_{result}":
            tensor = tensor[slice(*part_of(self.m, self.world.rank, self.world.num_ranks))]
        if self.is_sliced and one.name == self.left:
            tensor = tensor[: self.m]  # no others are sent
        is_pointer = one.name in self._pointers and not (is_sm90 and one.sort == "operand")
        if not tma or is_pointer:
            return tensor
        describe = descriptors_sm90.descriptor if is_sm90 else blocking.descriptor
        tile_m, tile_n, tile_k = self.tile if is_sm90 else self.plain_tile
        if one.name in self.launch.writes[1:]:  # a chunk's rows lie in one piece, as an engine asks
            kept = tensor.view(-1, self.n // self.parts.chunks)
            return describe(kept, launches.chunk_of(tile_m, tile_n, self.itemsize))
        if one.name == self.right:
            return launches.describe_b(tensor, tile_n, tile_k, self.b_is_nk, is_sm90)
        is_result = one.name == self._operands[-1]
        if not tensor.numel():
            # Without rows there is no address to describe, and no tile is read or stored.
            tensor = next(bound[name] for name in self._spares(is_result) if bound[name].numel())
            tensor = tensor.view(-1, tensor.shape[-1])
            tensor = tensor if tensor.stride(1) == 1 else tensor.t()
        if not is_result:
            return describe(tensor, (tile_m, tile_k))
        chunk = launches.chunk_of(tile_m, tile_n, self.itemsize) if is_sm90 else (tile_m, tile_n)
        return describe(tensor, chunk)

    def _piece_of(self, tensor: torch.Tensor, is_staged: bool) -> torch.Tensor:
        """Its chunk of B's columns, or of what is staged, where a chunk lies in one piece."""
        chunk, chunks = self.launch.piece
        if is_staged:
            return tensor.view(chunks, -1, self.n)[chunk]
        return tensor[:, chunk * self.n : (chunk + 1) * self.n]

    def _spares(self, is_result: bool) -> tuple[str, ...]:
        """Buffers as wide as an operand that may have no rows here."""
        # A rank without rows among others that have some: of its operands another one.
        beside = (*self.launch.pushes, *self.launch.writes[1:]) if is_result else ()
        return (*beside, self.left, self.right)
