"""Launches of the rows template in a plan, and how rows are cut for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

import torch
import triton

from weft.base.dtypes import DTYPES
from weft.base.errors import ConfigError
from weft.base.parts import full_part
from weft.base.place import UNKNOWN, Place
from weft.base.target import Target
from weft.compiler.lower import compose, source
from weft.ir import core
from weft.ir.device import Launch
from weft.plan.launches import (
    MOVING_WARPS,
    REGISTERS_OF_THREAD,
    THREADS_OF_SM,
    KernelLaunch,
    Start,
    tables_in,
)
from weft.plan.sizes import SizedPlan, columns_here
from weft.tiles import own_rows, rows
from weft.tiles.hooks import partition
from weft.tiles.mailboxes import PACKET_BYTES
from weft.tiles.relay import groups_among

# Elements of a tile that a thread has, and threads of a program.
THREAD_ELEMENTS, MOST_THREADS = 32, 512
# Of rows that are this rank's alone: elements of a tile, in two or four loads of 16 bytes for each
# of 128 threads; on the emulator, whose programs are dear.
OWN_ELEMENTS, EMULATED_ELEMENTS, EMULATED_PROGRAMS = 2048, 256, 3
OF_WHOLE_ROWS = ("rms_norm", "turn", "turn_by_table")


class Rows(NamedTuple):
    """m rows of n columns, `rows` of them each rank's."""

    m: int
    n: int
    rows: int
    num_ranks: int


@dataclass(frozen=True)
class RowBlocking:
    """Rows that a program has at a time, one by packets, and its warps. What is `sized` says what
    Rows does."""

    by_packets: bool
    tile_m: int
    num_warps: int

    @classmethod
    def of(cls, by_packets: bool, m: int, n: int, target: Target) -> RowBlocking:
        """For m rows of n columns, up to rows.MOST_COLUMNS."""
        columns = triton.next_power_of_2(max(2, n))
        if by_packets:  # a row is all that a program has, and nothing hides it
            threads = min(MOST_THREADS, max(128, columns // 8))
            return cls(True, 1, threads // target.warp_size)
        # Rows enough for all SMs come before larger messages.
        fits = max(1, THREAD_ELEMENTS * 256 // columns)
        wanted = triton.next_power_of_2(max(1, m // target.num_sms))
        tile_m = min(fits, wanted)
        if target.backend == "emu":  # two tiles for each rank at least, of few rows
            tile_m = 1 if m <= 4 else 2
        threads = min(MOST_THREADS, max(128, tile_m * columns // THREAD_ELEMENTS))
        return cls(False, tile_m, threads // target.warp_size)

    def check(self, title: str, n: int, place: Place = UNKNOWN, remedy: str = "") -> None:
        """Raises  ConfigError: n columns are not one tile, or sizes are no powers of two"""
        for name in ("tile_m", "num_warps"):
            if (value := getattr(self, name)) < 1 or value & (value - 1):
                message = f"{title}: {name}={value}; it must be a power of two"
                raise ConfigError(message, place=place)
        if n > rows.MOST_COLUMNS:
            message = f"{title}: n={n}; a row is one tile, of up to {rows.MOST_COLUMNS} columns"
            raise ConfigError(message + remedy, place=place)

    def parts(self, sized: Any) -> partition.Parts:
        """How rows are cut: other ranks' tiles first, own ones behind them."""
        tiles_m = ceil(sized.rows / self.tile_m)
        others = (sized.num_ranks - 1) * tiles_m
        sizes = (sized.m, sized.n, sized.rows, self.tile_m, self.tile(sized).n, tiles_m)
        return partition.Parts(*sizes, 1, 1, others, tiles_m, tiles_m, 1, 1)

    def tile(self, sized: Any) -> rows.Tile:
        return rows.Tile(self.tile_m, triton.next_power_of_2(max(2, sized.n)))

    def grid(self, sized: Any, target: Target, spare: int = 0) -> int:
        """Programs: all of them are resident, on NVIDIA several to an SM where they fit; but for
        `spare` of these, which another kernel has."""
        tiles = sized.m
        if not self.by_packets:
            tiles = sized.num_ranks * ceil(sized.rows / self.tile_m)
        if target.backend == "emu":
            return max(1, min(tiles, target.num_sms - spare, 3))
        threads = self.num_warps * target.warp_size
        together = max(1, THREADS_OF_SM // threads) if target.backend == "cuda" else 1
        return max(1, min(tiles, target.num_sms * together - spare))

    def options(self, sized: Any, target: Target, spare: int = 0) -> dict[str, int]:
        """What kernels are launched with. Programs that share an SM share its registers."""
        options, programs = {"num_warps": self.num_warps}, self.grid(sized, target, spare) + spare
        if target.backend == "cuda" and programs > target.num_sms:
            options["maxnreg"] = REGISTERS_OF_THREAD
        return options


class SummedRows(KernelLaunch):
    """A launch of the rows template at given sizes."""

    def __init__(self, plan: SizedPlan, launch: Launch, kernel: core.Kernel) -> None:
        self.launch, self.kernel, self.world = launch, kernel, plan.world
        self.variants = source.load(kernel)
        ranks, target = plan.world.num_ranks, plan.world.target
        channel = next(one for one in plan.channels.values() if one.buffer in launch.pushes)
        m, (_, n) = plan.rows(channel), plan.shape(launch.writes[0])
        # Of a token's rows that are added up.
        self._top_k = {one.by: plan.shape(one.by)[1] for one in kernel.of(core.Param)
                       if one.sort == "count"}  # fmt: skip
        sized = Rows(m, n, full_part(m, ranks), ranks)
        by_packets = any(one.sort == "packets" for one in kernel.of(core.Param))
        cut = RowBlocking.of(by_packets, m, n, target)
        if launch.tile[0] > 1:
            cut = replace(cut, tile_m=launch.tile[0])
        cut.check(launch.kernel, n, launch.place)
        self.grid = (cut.grid(sized, target, launch.spare), 1, 1)
        self.options = cut.options(sized, target, launch.spare)
        self.groups = groups_among(plan.nodes)
        # A program of a relay needs no more of an SM than one of these, whose place it has.
        self.of_relay = {**self.options, "num_warps": min(MOVING_WARPS, cut.num_warps)}
        self.parts, self.tile = cut.parts(sized), cut.tile(sized).as_constexpr()
        self.axes = ("tile", self.parts.tiles_m), ("from rank", ranks)
        if by_packets:
            self._set_packets(plan, sized)

    def _set_packets(self, plan: SizedPlan, sized: Rows) -> None:
        """By buffer what a slot calls its packets, and how many there are. Those of rows alike lie
        alike, whichever calls have them: so words that held packets never hold something else."""
        pushes, m = self.launch.pushes, sized.m
        if len(pushes) == 1:
            # One part, of all rows.
            self.parts = self.parts._replace(rows=m, tiles_m=ceil(m / self.tile.m.value))
        itemsize = DTYPES[plan.buffers[self.launch.writes[0]].dtype].itemsize
        num_packets = self.tile.n.value * itemsize // PACKET_BYTES.value
        # A box for each row of a part, source and half.
        boxes = 2 * self.parts.rows * sized.num_ranks
        self.packets = {name: f"{name}_{num_packets}" for name in pushes}
        words = (boxes * num_packets, torch.int64)
        self.signals = dict.fromkeys(self.packets.values(), words)

    def start(
        self, bound: Mapping[str, torch.Tensor], words: Mapping[str, torch.Tensor], slot: Any,
        split: Any,
    ) -> Start:  # fmt: skip
        given: list[Any] = []
        for one in self.kernel.of(core.Param):
            if one.name == "groups":
                given.append(self.groups)
            elif one.sort == "number":
                given.append(float(one.by))
            elif one.sort == "count":
                given.append(self._top_k[one.by])
            elif one.sort == "tables":
                given.append(tables_in(bound, one.name, self.world))
            elif one.sort not in ("slot", "world"):
                given.append(words[one.name] if one.sort == "signals" else bound[one.name])
        arguments = (
            *self.variants.arranged(given),
            slot.arg,
            self.parts,
            self.tile,
            self.world.arg,
        )
        return Start(self.variants.plain, self.grid, arguments, self.options)


class OwnRows(KernelLaunch):
    """A launch of the template for rows that this rank has alone. Of what it is given it reads
    columns where they lie: results of calls that are parts of others need not be packed."""

    def __init__(self, plan: SizedPlan, launch: Launch, kernel: core.Kernel) -> None:
        self.launch, self.kernel, self.world, self.plan = launch, kernel, plan.world, plan
        self.variants = source.load(kernel)
        m, self.n = plan.shape(launch.writes[0])
        n = next((do.head for do in launch.body if do.head), self.n)
        heads, target = self.n // n if n else 1, plan.world.target
        is_whole = any(one.function in OF_WHOLE_ROWS for one in kernel.of(core.Hook))
        tile, threads = own_tile(n, is_whole, target)
        self.tile = tile.as_constexpr()
        self.cut = own_rows.Cut(m * heads, n, ceil(n / tile.n), max(1, heads))
        tiles = max(1, ceil(self.cut.m / tile.m) * self.cut.columns)
        self.grid = (min(tiles, EMULATED_PROGRAMS) if target.backend == "emu" else tiles, 1, 1)
        self.options = {"num_warps": threads // target.warp_size}
        self._params = compose.params_of(kernel)

    def start(
        self, bound: Mapping[str, torch.Tensor], words: Mapping[str, torch.Tensor], slot: Any,
        split: Any,
    ) -> Start:  # fmt: skip
        given = [self._given(one, bound) for one in self._params]
        arguments = (
            *self.variants.arranged(given), slot.arg, self.cut, self.tile, self.world.arg,
        )  # fmt: skip
        return Start(self.variants.plain, self.grid, arguments, self.options)

    @property
    def packed(self) -> list[str]:
        return [one.by or one.name for one in self._params if one.sort == "pointer"]

    def _given(self, one: core.Param, bound: Mapping[str, torch.Tensor]) -> Any:
        if one.sort == "number":
            return float(one.by)
        if one.sort == "pointer":
            return bound[one.by or one.name]
        rows = self._view(one.name, one.by, bound)
        return own_rows.View(rows, rows.stride(0))

    def _view(self, name: str, of: str, bound: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A buffer, or columns of one; of a gate's the second half."""
        if not of:
            return bound[name]
        found = next((do for do in self.launch.body if do.result == name), None)
        if found is not None:
            (source,), between = found.operands, found.between
            assert between is not None
            buffer, num_ranks = self.plan.buffers[source], self.world.num_ranks
            return bound[source][:, slice(*columns_here(buffer, between, num_ranks))]
        by = next((one.by for one in self._params if one.name == of), "")
        return self._view(of, by, bound)[:, self.n :]


def own_tile(n: int, is_whole: bool, target: Target) -> tuple[rows.Tile, int]:
    """The tile for rows of n columns, and the threads that have it: all columns where rows are
    worked on as a whole."""
    most = EMULATED_ELEMENTS if target.backend == "emu" else OWN_ELEMENTS
    columns = triton.next_power_of_2(max(2, n))
    if not is_whole:
        columns = min(columns, most)
    threads = max(128, min(MOST_THREADS, columns // 16), columns // THREAD_ELEMENTS)
    return rows.Tile(max(1, most // columns), columns), threads
